// Rows times packed matrices: what the operators that do so have in common.
#pragma once

#include <vector>

#include "matrices.h"
#include "operators.h"

namespace mtp {

// Weights that one task reads: enough to make its start cheap, few enough to share them out evenly.
constexpr size_t kTaskBytes = 64 << 10;

// The matrices of a node, whose memory it holds.
struct Matrices {
    Api api;
    std::vector<const Matrix*> all;
    bool rounds_blocks = false, rounds_rows = false;
    Instructions used = Instructions::avx2;

    explicit Matrices(const Api& api) : api(api) {}
    Matrices(const Matrices&) = delete;
    Matrices& operator=(const Matrices&) = delete;
    ~Matrices();

    // Those of the attribute `matrices`, all of one width.
    Status* load(const runtime::Info* info);
    int columns() const { return all[0]->columns; }
};

// float32[count, columns], and what integers they are for matrices of integers: buffers of the thread that calls.
struct Rows {
    const float* values;
    int count, columns, run;
    BlockInput blocks;
    RotatedInput rotated;

    // Turns and rounds the `count` rows of `x` on the session's threads.
    Status* set(const Matrices& matrices, runtime::Context* context, const Tensor& x);
    void multiply(const Matrix& matrix, int first_group, int last_group, const Output& out) const;
};

// Rows of x, whose last axis has the width of the matrices; the error of a call where it has not.
Status* count_rows(const Matrices& matrices, const Tensor& x, int* count);

// Groups of a matrix that one task multiplies with.
int groups_of_task(const Matrix& matrix);

// Makes the `Matrices` of a node.
Status* create_with_matrices(const Operation*, const void* table, const runtime::Info* info, void** state);

}  // namespace mtp

// Matrices in the layout of the kernels, in memory that lies in huge pages.
#pragma once

#include <cstdint>

#include "memory.h"
#include "rows.h"

namespace mtp {

enum class Kind : int32_t { blocks = 1, rotated = 2, whole = 3 };

// A matrix [outputs, columns]; `data` as the file of its kind describes it.
struct Matrix {
    Kind kind;
    Instructions used;  // They shape what is packed.
    int32_t outputs, columns, blocks, run;
    uint8_t* data;
    float* scales;  // of `rotated`
    Arena* arena;
};

// The matrix at an address of a graph, whose memory is then held; nullptr if there is none: graphs are not trusted.
const Matrix* held_matrix(int64_t address);

// Columns that are packed together are a group.
int group_size(const Matrix& matrix);
int group_count(const Matrix& matrix);
size_t group_bytes(const Matrix& matrix);

// Where products go: rows of `stride` values, of which the first is that of `column`.
struct Output {
    float* values;
    size_t stride;
    int column;

    float* at(int row, int of_column) const { return values + row * stride + (of_column - column); }
};

// blocks.cpp: 8 columns together, with VNNI 16; for each block 32 bytes of integers a column, and the scales.
constexpr int kBlockGroup = 8;
constexpr int kWideBlockGroup = 16;
constexpr int kBlockBytes = 32 + sizeof(float);  // of one column
void pack_blocks(const uint8_t* blocks, const float* scales, int first_group, int last_group, Matrix& matrix);
void multiply_blocks(const Matrix& matrix, const BlockInput& x, int first_group, int last_group, const Output& out);
void multiply_blocks_vnni(const Matrix& matrix, const BlockInput& x, int first_group, int last_group, const Output& out);

// rotated.cpp: 16 columns together, for each pair of rows 32 bytes of integers.
constexpr int kRotatedGroup = 16;
void pack_rotated(const uint8_t* values, const float* scales, bool by_rows, int first_group, int last_group,
                  Matrix& matrix);
void multiply_rotated(const Matrix& matrix, const RotatedInput& x, int first_group, int last_group, const Output& out);
void multiply_rotated_vnni(const Matrix& matrix, const RotatedInput& x, int first_group, int last_group, const Output& out);

// whole.cpp: 8 columns of floats together.
constexpr int kWholeGroup = 8;
void pack_whole(const float* values, int first_group, int last_group, Matrix& matrix);
void multiply_whole(const Matrix& matrix, const float* x, int rows, int first_group, int last_group, const Output& out);

}  // namespace mtp

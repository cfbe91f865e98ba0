// Rows of the gated delta rule on the state of one head.
#pragma once

namespace mtp {

// What a row feeds into the recurrence of one value head.
struct DeltaRow {
    const float* query;  // unit length, scaled; nullptr where no output is wanted
    const float* key;    // unit length
    const float* value;
    float decay;  // in log space
    float beta;
    float* output;  // like `value`; nullptr where none is wanted
};

// A function of the number of a row.
using RowOf = DeltaRow (*)(const void* data, int row);

// Rows of one source after each other.
struct DeltaRun {
    int count;
    RowOf row_of;
    const void* data;
};

// S <- exp(g) S; d = beta (v - S^T k); S <- S + k d^T; o = S^T q, for every row of `first`, then of `second`.
//
// `past` and `present` are float32[key_dim, value_dim] and do not overlap; `present` gets the state after all rows, or
// after those of `first`, or is nullptr. Value columns do not meet each other, and a row's arithmetic is the same
// whatever rows follow, where they come from, and whether its output is wanted.
void delta_rows(const float* past, float* present, int key_dim, int value_dim, const DeltaRun& first,
                const DeltaRun& second, bool keeps_second);

// x / sqrt(sum(x^2) + 1e-6), times `factor`.
void unit_row(const float* x, int dim, float factor, float* out);

}  // namespace mtp

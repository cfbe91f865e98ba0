// Products with small matrices of floats, beside those with integers that meet the same rows.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "matrices.h"

namespace mtp {
namespace {

constexpr int kSums = 4;

// `M` rows times the 8 columns of a group: four sums take turns, since one would wait for itself.
template <int M>
__attribute__((noinline)) void tile(const Matrix& matrix, const float* x, int row, int group, const Output& out) {
    const int columns = matrix.columns;
    const float* data = reinterpret_cast<const float*>(matrix.data) + static_cast<size_t>(group) * columns * kWholeGroup;
    __m256 sums[M][kSums];
    for (int m = 0; m < M; ++m)
        for (int i = 0; i < kSums; ++i) sums[m][i] = _mm256_setzero_ps();
    const auto add = [&](int column, int i) {
        const __m256 weights = _mm256_load_ps(data + static_cast<size_t>(column) * kWholeGroup);
        for (int m = 0; m < M; ++m) {
            const __m256 given = _mm256_broadcast_ss(x + static_cast<size_t>(row + m) * columns + column);
            sums[m][i] = _mm256_fmadd_ps(given, weights, sums[m][i]);
        }
    };
    int column = 0;
    for (; column + kSums <= columns; column += kSums)
        for (int i = 0; i < kSums; ++i) add(column + i, i);
    for (int i = 0; column < columns; ++column, ++i) add(column, i);
    const int first = group * kWholeGroup, count = std::min(kWholeGroup, matrix.outputs - first);
    for (int m = 0; m < M; ++m) {
        alignas(32) float all[kWholeGroup];
        const __m256 total = _mm256_add_ps(_mm256_add_ps(sums[m][0], sums[m][1]), _mm256_add_ps(sums[m][2], sums[m][3]));
        _mm256_store_ps(all, total);
        std::memcpy(out.at(row + m, first), all, count * sizeof(float));
    }
}

}  // namespace

void pack_whole(const float* values, int first_group, int last_group, Matrix& matrix) {
    for (int group = first_group; group < last_group; ++group) {
        float* to = reinterpret_cast<float*>(matrix.data) + static_cast<size_t>(group) * matrix.columns * kWholeGroup;
        for (int c = 0; c < kWholeGroup; ++c) {
            const int output = group * kWholeGroup + c;
            for (int column = 0; column < matrix.columns; ++column)
                to[column * kWholeGroup + c] =
                    output < matrix.outputs ? values[static_cast<size_t>(output) * matrix.columns + column] : 0;
        }
    }
}

void multiply_whole(const Matrix& matrix, const float* x, int rows, int first_group, int last_group,
                    const Output& out) {
    for (int group = first_group; group < last_group; ++group) {
        int row = 0;
        for (; row + 2 <= rows; row += 2) tile<2>(matrix, x, row, group, out);
        if (row < rows) tile<1>(matrix, x, row, group, out);
    }
}

}  // namespace mtp

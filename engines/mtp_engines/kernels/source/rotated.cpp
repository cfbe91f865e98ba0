// Products with rotated matrices of 8-bit integers and one scale a row.
//
// Whole rows are summed in integers, which have no order: a row's result never depends on how many rows there are.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "matrices.h"

namespace mtp {
namespace {

void store(__m256 values, float* out, int count) {
    if (count >= 8) return _mm256_storeu_ps(out, values);
    if (count <= 0) return;
    alignas(32) float all[8];
    _mm256_store_ps(all, values);
    std::memcpy(out, all, count * sizeof(float));
}

// `M` rows from `row` on times the 16 columns of `group`.
template <int M>
__attribute__((noinline)) void tile(const Matrix& matrix, const RotatedInput& x, int row, int group, const Output& out) {
    const int pairs = x.columns / 2;
    const __m128i* data = reinterpret_cast<const __m128i*>(matrix.data) + static_cast<size_t>(group) * pairs * 2;
    const int16_t* values = x.values.data() + static_cast<size_t>(row) * x.columns;
    __m256i lower[M], upper[M];
    for (int m = 0; m < M; ++m) lower[m] = upper[m] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int pair = 0; pair < pairs; ++pair) {
        const __m256i first = _mm256_cvtepi8_epi16(_mm_load_si128(data + 2 * pair));
        const __m256i second = _mm256_cvtepi8_epi16(_mm_load_si128(data + 2 * pair + 1));
        for (int m = 0; m < M; ++m) {
            int32_t two;
            std::memcpy(&two, values + 2 * (pair * M + m), 4);
            const __m256i given = _mm256_set1_epi32(two);
            lower[m] = _mm256_add_epi32(lower[m], _mm256_madd_epi16(first, given));
            upper[m] = _mm256_add_epi32(upper[m], _mm256_madd_epi16(second, given));
        }
    }
    const int column = group * kRotatedGroup;
    const __m256 low = _mm256_loadu_ps(matrix.scales + column), high = _mm256_loadu_ps(matrix.scales + column + 8);
    for (int m = 0; m < M; ++m) {
        const __m256 scale = _mm256_set1_ps(x.scales[row + m]);
        float* to = out.at(row + m, column);
        store(_mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(lower[m]), scale), low), to, matrix.outputs - column);
        store(_mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(upper[m]), scale), high), to + 8,
              matrix.outputs - column - 8);
    }
}

}  // namespace

void pack_rotated(const uint8_t* values, const float* scales, bool by_rows, int first_group, int last_group,
                  Matrix& matrix) {
    const int columns = matrix.columns, outputs = matrix.outputs, pairs = (columns + 1) / 2;
    const size_t row_step = by_rows ? columns : 1, column_step = by_rows ? 1 : outputs;
    for (int group = first_group; group < last_group; ++group) {
        uint8_t* to = matrix.data + static_cast<size_t>(group) * pairs * 32;
        const int first = group * kRotatedGroup, count = std::min(kRotatedGroup, outputs - first);
        std::memcpy(matrix.scales + first, scales + first, count * sizeof(float));
        for (int pair = 0; pair < pairs; ++pair, to += 32) {
            const uint8_t* from = values + first * row_step + 2 * pair * column_step;
            const bool whole = 2 * pair + 1 < columns;
            for (int c = 0; c < kRotatedGroup; ++c) {
                const uint8_t* at = from + c * row_step;
                to[2 * c] = c < count ? at[0] ^ 0x80 : 0;
                to[2 * c + 1] = c < count && whole ? at[column_step] ^ 0x80 : 0;
            }
        }
    }
}

void multiply_rotated(const Matrix& matrix, const RotatedInput& x, int first_group, int last_group, const Output& out) {
    if (matrix.used == Instructions::vnni) return multiply_rotated_vnni(matrix, x, first_group, last_group, out);
    for (int group = first_group; group < last_group; ++group) {
        in_tiles<kTile>(x.rows, [&](auto count, int row) { tile<decltype(count)::value>(matrix, x, row, group, out); });
    }
}

}  // namespace mtp

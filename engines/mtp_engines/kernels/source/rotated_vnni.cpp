// Products with rotated matrices on processors with VNNI: the same sums as in rotated.cpp, in fewer instructions.
#include <immintrin.h>

#include <cstring>

#include "matrices.h"
#include "processor.h"

namespace mtp {
namespace {

MTP_VNNI inline __m512i two_values(const int16_t* values) {
    int32_t two;
    std::memcpy(&two, values, 4);
    return _mm512_set1_epi32(two);
}

// `M` rows from `row` on times the 16 columns of `group`.
template <int M>
MTP_VNNI __attribute__((noinline)) void tile(const Matrix& matrix, const RotatedInput& x, int row, int group, const Output& out) {
    constexpr int turns = M == 1 ? 4 : M <= 3 ? 2 : 1;  // Several sums take turns, since one would wait for itself.
    const int pairs = x.columns / 2;
    const __m256i* data = reinterpret_cast<const __m256i*>(matrix.data) + static_cast<size_t>(group) * pairs;
    const int16_t* values = x.values.data() + static_cast<size_t>(row) * x.columns;
    __m512i sums[turns][M];
    for (int turn = 0; turn < turns; ++turn)
        for (int m = 0; m < M; ++m) sums[turn][m] = _mm512_setzero_si512();
    int pair = 0;
    for (; pair + 4 <= pairs; pair += 4) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const __m512i weights = _mm512_cvtepi8_epi16(_mm256_load_si256(data + pair + i));
            for (int m = 0; m < M; ++m)
                sums[i % turns][m] = _mm512_dpwssd_epi32(sums[i % turns][m], weights, two_values(values + 2 * ((pair + i) * M + m)));
        }
    }
    for (; pair < pairs; ++pair) {
        const __m512i weights = _mm512_cvtepi8_epi16(_mm256_load_si256(data + pair));
        for (int m = 0; m < M; ++m)
            sums[0][m] = _mm512_dpwssd_epi32(sums[0][m], weights, two_values(values + 2 * (pair * M + m)));
    }
    const int column = group * kRotatedGroup, left = matrix.outputs - column;
    const __mmask16 stored = static_cast<__mmask16>(left >= kRotatedGroup ? 0xffff : (1 << left) - 1);
    const __m512 matrix_scales = _mm512_loadu_ps(matrix.scales + column);
    for (int m = 0; m < M; ++m) {
        __m512i sum = sums[0][m];
        for (int turn = 1; turn < turns; ++turn) sum = _mm512_add_epi32(sum, sums[turn][m]);
        const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(x.scales[row + m]));
        float* to = out.at(row + m, column);
        _mm512_mask_storeu_ps(to, stored, _mm512_mul_ps(scaled, matrix_scales));
    }
}

}  // namespace

void multiply_rotated_vnni(const Matrix& matrix, const RotatedInput& x, int first_group, int last_group, const Output& out) {
    for (int group = first_group; group < last_group; ++group) {
        in_tiles<kWideTile>(x.rows, [&](auto count, int row) { tile<decltype(count)::value>(matrix, x, row, group, out); });
    }
}

}  // namespace mtp

// Products with matrices of 4-bit blocks on processors with VNNI: the same sums as in blocks.cpp, in fewer instructions.
#include <immintrin.h>

#include <cstring>

#include "matrices.h"
#include "processor.h"

namespace mtp {
namespace {

MTP_VNNI inline __m512i four_values(const int8_t* values) {
    int32_t four;
    std::memcpy(&four, values, 4);
    return _mm512_set1_epi32(four);
}

// `M` rows from `row` on times the 16 columns of `group`.
template <int M>
MTP_VNNI __attribute__((noinline)) void tile(const Matrix& matrix, const BlockInput& x, int row, int group, const Output& out) {
    constexpr int turns = M <= 4 ? 2 : 1;  // Sums take turns, since one would wait for itself.
    const int blocks = matrix.blocks;
    constexpr int record_bytes = kBlockBytes * kWideBlockGroup;
    const uint8_t* record = matrix.data + static_cast<size_t>(group) * blocks * record_bytes;
    const size_t at = static_cast<size_t>(row) * blocks;
    const int8_t* values = x.values.data() + at * kBlock;
    const float* scales = x.scales.data() + at;
    const int32_t* offsets = x.offsets.data() + at;
    const __m512i half = _mm512_set1_epi8(15);
    __m512 sum[M];
    for (int m = 0; m < M; ++m) sum[m] = _mm512_setzero_ps();
    for (int block = 0; block < blocks; ++block) {
        __m512i found[turns][M];
        for (int m = 0; m < M; ++m) {
            found[0][m] = _mm512_set1_epi32(offsets[m]);
            if (turns == 2) found[turns - 1][m] = _mm512_setzero_si512();
        }
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            const __m512i both = _mm512_load_si512(record + 64 * j);
            const __m512i low = _mm512_and_si512(both, half), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), half);
            for (int m = 0; m < M; ++m)
                found[0][m] = _mm512_dpbusd_epi32(found[0][m], low, four_values(values + (j * M + m) * 4));
            for (int m = 0; m < M; ++m)
                found[turns - 1][m] =
                    _mm512_dpbusd_epi32(found[turns - 1][m], high, four_values(values + 32 * M + (j * M + m) * 4));
        }
        const __m512 weight_scales = _mm512_load_ps(record + 512);
        for (int m = 0; m < M; ++m) {
            if (turns == 2) found[0][m] = _mm512_add_epi32(found[0][m], found[turns - 1][m]);
            const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(found[0][m]), _mm512_set1_ps(scales[m]));
            sum[m] = _mm512_fmadd_ps(scaled, weight_scales, sum[m]);
        }
        record += record_bytes, values += kBlock * M, scales += M, offsets += M;
    }
    const int first = group * kWideBlockGroup, left = matrix.outputs - first;
    const __mmask16 stored = static_cast<__mmask16>(left >= kWideBlockGroup ? 0xffff : (1 << left) - 1);
    for (int m = 0; m < M; ++m)
        _mm512_mask_storeu_ps(out.at(row + m, first), stored, sum[m]);
}

}  // namespace

void multiply_blocks_vnni(const Matrix& matrix, const BlockInput& x, int first_group, int last_group, const Output& out) {
    for (int group = first_group; group < last_group; ++group) {
        in_tiles<kWideTile>(x.rows, [&](auto count, int row) { tile<decltype(count)::value>(matrix, x, row, group, out); });
    }
}

}  // namespace mtp

// Products with matrices of 4-bit blocks.
//
// A row's result never depends on how many rows there are: integers are summed exactly, and the floats of a row and a
// column are added block by block.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "matrices.h"

namespace mtp {
namespace {

// Four nibbles to the lower halves of four bytes.
uint32_t spread(uint16_t nibbles) {
    uint32_t x = nibbles;
    x = (x | x << 8) & 0x00ff00ff;
    return (x | x << 4) & 0x0f0f0f0f;
}

void store(__m256 values, float* out, int count) {
    if (count >= kBlockGroup) return _mm256_storeu_ps(out, values);
    alignas(32) float all[kBlockGroup];
    _mm256_store_ps(all, values);
    std::memcpy(out, all, count * sizeof(float));
}

__m256i four_values(const int8_t* values) {
    int32_t four;
    std::memcpy(&four, values, 4);
    return _mm256_set1_epi32(four);
}

// Adds a quarter of a block to 32-bit sums: the lower or upper nibbles of four registers, which are 16 columns.
// At most 4 * 2 * 15 * 128 = 15,360, which 16 bits hold.
template <int M, bool upper>
__attribute__((always_inline)) inline void add_quarter(const __m256i* integers, const int8_t* x, __m256i (&sums)[M]) {
    const __m256i half = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i quarter[M];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        __m256i values = _mm256_load_si256(integers + j);
        values = _mm256_and_si256(upper ? _mm256_srli_epi16(values, 4) : values, half);
        for (int m = 0; m < M; ++m) {
            const __m256i found = _mm256_maddubs_epi16(values, four_values(x + (j * M + m) * 4));
            quarter[m] = j == 0 ? found : _mm256_add_epi16(quarter[m], found);
        }
    }
    for (int m = 0; m < M; ++m) sums[m] = _mm256_add_epi32(sums[m], _mm256_madd_epi16(quarter[m], ones));
}

// `M` rows from `row` on times the 8 columns of `group`.
template <int M>
__attribute__((noinline)) void tile(const Matrix& matrix, const BlockInput& x, int row, int group, const Output& out) {
    const int blocks = matrix.blocks;
    constexpr int record_bytes = kBlockBytes * kBlockGroup;
    const uint8_t* record = matrix.data + static_cast<size_t>(group) * blocks * record_bytes;
    const size_t at = static_cast<size_t>(row) * blocks;
    const int8_t* values = x.values.data() + at * kBlock;
    const float* scales = x.scales.data() + at;
    const int32_t* offsets = x.offsets.data() + at;
    __m256 sum[M];
    for (int m = 0; m < M; ++m) sum[m] = _mm256_setzero_ps();
    for (int block = 0; block < blocks; ++block) {
        const __m256i* integers = reinterpret_cast<const __m256i*>(record);
        __m256i found[M];
        for (int m = 0; m < M; ++m) found[m] = _mm256_set1_epi32(offsets[m]);
        add_quarter<M, false>(integers, values, found);
        add_quarter<M, true>(integers, values + 32 * M, found);
        add_quarter<M, false>(integers + 4, values + 16 * M, found);
        add_quarter<M, true>(integers + 4, values + 48 * M, found);
        const __m256 weight_scales = _mm256_load_ps(reinterpret_cast<const float*>(record + 256));
        for (int m = 0; m < M; ++m) {
            const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(found[m]), _mm256_set1_ps(scales[m]));
            sum[m] = _mm256_fmadd_ps(scaled, weight_scales, sum[m]);
        }
        record += record_bytes, values += kBlock * M, scales += M, offsets += M;
    }
    const int first = group * kBlockGroup;
    for (int m = 0; m < M; ++m)
        store(sum[m], out.at(row + m, first), matrix.outputs - first);
}

}  // namespace

void pack_blocks(const uint8_t* blocks, const float* scales, int first_group, int last_group, Matrix& matrix) {
    const int count = matrix.blocks, size = group_size(matrix);
    for (int group = first_group; group < last_group; ++group) {
        uint8_t* record = matrix.data + group * group_bytes(matrix);
        for (int block = 0; block < count; ++block, record += kBlockBytes * size) {
            for (int c = 0; c < size; ++c) {
                const int output = group * size + c;
                float scale = 0;
                uint16_t quads[16] = {};
                if (output < matrix.outputs) {
                    const size_t at = static_cast<size_t>(output) * count + block;
                    std::memcpy(quads, blocks + at * 32, 32);
                    scale = scales[at];
                }
                for (int j = 0; j < 8; ++j) {
                    const uint32_t four = spread(quads[j]) | spread(quads[8 + j]) << 4;
                    std::memcpy(record + 4 * (j * size + c), &four, 4);
                }
                std::memcpy(record + 4 * (8 * size + c), &scale, 4);
            }
        }
    }
}

void multiply_blocks(const Matrix& matrix, const BlockInput& x, int first_group, int last_group, const Output& out) {
    if (matrix.used == Instructions::vnni) return multiply_blocks_vnni(matrix, x, first_group, last_group, out);
    for (int group = first_group; group < last_group; ++group) {
        in_tiles<kTile>(x.rows, [&](auto count, int row) { tile<decltype(count)::value>(matrix, x, row, group, out); });
    }
}

}  // namespace mtp

#include "rows.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace mtp {
namespace {

constexpr float kNothing = 1e-30f;  // What is smaller has no number of steps that a float holds.

// In place: `size` values, a power of two, times Sylvester's Hadamard matrix without its factor 1 / sqrt(size).
void hadamard(float* values, int size) {
    for (int half = 1; half < size; half *= 2)
        for (int first = 0; first < size; first += 2 * half)
            for (int i = first; i < first + half; ++i) {
                const float a = values[i], b = values[i + half];
                values[i] = a + b;
                values[i + half] = a - b;
            }
}

__m256 transposed_step(__m256 row, __m256 swapped, __m256 signs) {
    return _mm256_add_ps(swapped, _mm256_xor_ps(row, signs));
}

// The same for 64 values: H64 is the Kronecker product of two H8, one across registers and one inside of each.
void hadamard64(float* values) {
    __m256 r[8];
    for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(values + 8 * i);
    for (int half = 1; half < 8; half *= 2)
        for (int first = 0; first < 8; first += 2 * half)
            for (int i = first; i < first + half; ++i) {
                const __m256 a = r[i], b = r[i + half];
                r[i] = _mm256_add_ps(a, b);
                r[i + half] = _mm256_sub_ps(a, b);
            }
    const __m256 odd = _mm256_castsi256_ps(_mm256_set_epi32(1 << 31, 0, 1 << 31, 0, 1 << 31, 0, 1 << 31, 0));
    const __m256 pair = _mm256_castsi256_ps(_mm256_set_epi32(1 << 31, 1 << 31, 0, 0, 1 << 31, 1 << 31, 0, 0));
    const __m256 upper = _mm256_castsi256_ps(_mm256_set_epi32(1 << 31, 1 << 31, 1 << 31, 1 << 31, 0, 0, 0, 0));
    for (int i = 0; i < 8; ++i) {
        __m256 v = r[i];
        v = transposed_step(v, _mm256_permute_ps(v, 0xB1), odd);
        v = transposed_step(v, _mm256_permute_ps(v, 0x4E), pair);
        v = transposed_step(v, _mm256_permute2f128_ps(v, v, 1), upper);
        _mm256_storeu_ps(values + 8 * i, v);
    }
}

// The greatest size; what is not finite must reach the outputs, so it is NaN then, and the scale carries it there.
float greatest(const float* values, int count) {
    constexpr int32_t infinite = 0x7f800000;
    int32_t found = 0;
    for (int i = 0; i < count; ++i) {
        int32_t bits;
        std::memcpy(&bits, values + i, 4);
        found = std::max(found, bits & 0x7fffffff);  // Sizes of floats are ordered as their bits are.
    }
    float size;
    std::memcpy(&size, &found, 4);
    if (found >= infinite) return std::nanf("");
    return size < kNothing ? 0 : size;
}

// Eight at a time, to the nearest integer, ties to even; NaN becomes the least integer.
__m256i nearest(const float* values, __m256 steps) {
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(values), steps));
}

// int8 of 64 values, and their sum.
int32_t round_block(const float* values, float factor, int8_t* out) {
    const __m256 steps = _mm256_set1_ps(factor);
    const __m256i order = _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0);
    __m256i sum = _mm256_setzero_si256();
    for (int i = 0; i < kBlock; i += 32) {
        __m256i four[4];
        for (int j = 0; j < 4; ++j) {
            four[j] = nearest(values + i + 8 * j, steps);
            sum = _mm256_add_epi32(sum, four[j]);
        }
        const __m256i all = _mm256_packs_epi16(_mm256_packs_epi32(four[0], four[1]), _mm256_packs_epi32(four[2], four[3]));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_permutevar8x32_epi32(all, order));
    }
    const __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    const __m128i pair = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(pair, _mm_shuffle_epi32(pair, 0xB1)));
}

void round_row(const float* values, int count, float factor, int16_t* out) {
    const __m256 steps = _mm256_set1_ps(factor);
    int i = 0;
    for (; i + 16 <= count; i += 16) {
        const __m256i both = _mm256_packs_epi32(nearest(values + i, steps), nearest(values + i + 8, steps));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_permute4x64_epi64(both, 0xD8));
    }
    for (; i < count; ++i) {
        const int32_t value = _mm_cvtss_si32(_mm_set_ss(values[i] * factor));
        out[i] = static_cast<int16_t>(std::max(-32768, std::min(32767, value)));
    }
}

}  // namespace

void BlockInput::resize(int row_count, int block_count, Instructions used) {
    rows = row_count, blocks = block_count, tile = tile_of(used);
    const size_t count = static_cast<size_t>(rows) * blocks;
    values.resize(count * kBlock), scales.resize(count), offsets.resize(count);
}

void BlockInput::set(int row, const float* x, int columns) {
    constexpr float most = 127;
    const Place place(row, rows, tile);
    alignas(32) float turned[kBlock];
    alignas(32) int8_t rounded[kBlock];
    for (int block = 0; block < blocks; ++block) {
        const int count = std::min(kUsed, columns - block * kUsed);
        // The matrix lacks its first row: a zero stands before the 63 columns.
        turned[0] = 0;
        std::memcpy(turned + 1, x + block * kUsed, count * sizeof(float));
        std::memset(turned + 1 + count, 0, (kUsed - count) * sizeof(float));
        hadamard64(turned);
        const float size = greatest(turned, kBlock);
        const float steps = size > 0 ? most / size : 0;
        const int32_t sum = round_block(turned, steps, rounded);
        const size_t at = static_cast<size_t>(place.first) * blocks + block * place.count;
        scales[at + place.within] = size / (most * 8);  // 8 is the root of 64.
        offsets[at + place.within] = -8 * sum;
        int8_t* to = values.data() + at * kBlock + 4 * place.within;
        for (int i = 0; i < kBlock; i += 4, to += 4 * place.count) std::memcpy(to, rounded + i, 4);
    }
}

void RotatedInput::resize(int row_count, int column_count, Instructions used) {
    rows = row_count, columns = column_count, tile = tile_of(used);
    values.resize(static_cast<size_t>(rows) * columns), scales.resize(rows);
}

void RotatedInput::set(int row, const float* x, int stored_columns, int run) {
    static thread_local std::vector<float> turned;
    static thread_local std::vector<int16_t> rounded;
    turned.resize(columns), rounded.resize(columns);
    std::memcpy(turned.data(), x, stored_columns * sizeof(float));
    std::fill(turned.begin() + stored_columns, turned.end(), 0.f);
    for (int first = 0; first < stored_columns; first += run)
        run == kBlock ? hadamard64(turned.data() + first) : hadamard(turned.data() + first, run);
    // Products with integers of 8 bits must not leave 31 bits in sum.
    const float most = std::floor(std::min(32767.f, 2147483647.f / (128.f * columns)) * 0.999f);
    const float size = greatest(turned.data(), columns);
    round_row(turned.data(), columns, size > 0 ? most / size : 0, rounded.data());
    const Place place(row, rows, tile);
    int16_t* to = values.data() + static_cast<size_t>(place.first) * columns + 2 * place.within;
    for (int i = 0; i < columns; i += 2, to += 2 * place.count) std::memcpy(to, rounded.data() + i, 4);
    scales[row] = size / (most * std::sqrt(static_cast<float>(run)));
}

}  // namespace mtp

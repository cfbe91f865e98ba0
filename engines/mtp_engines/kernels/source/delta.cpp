#include "delta.h"

#include "exponential.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace mtp {
namespace {

constexpr int kWide = 32;  // Columns of the state that stay in the first cache while all rows pass over them.
constexpr int kVectors = kWide / 8;

struct Aligned {
    std::vector<float> memory;

    float* at_least(size_t count) {
        if (memory.size() < count + 8) memory.resize(count + 8);
        const uintptr_t start = reinterpret_cast<uintptr_t>(memory.data());
        return memory.data() + (32 - start % 32) % 32 / sizeof(float);
    }
};

// Blocks of `kWide` columns behind each other, the last one filled up with zeros; memory is read in order.
void read(const float* from, int key_dim, int value_dim, int blocks, float* to) {
    for (int i = 0; i < key_dim; ++i, from += value_dim)
        for (int block = 0; block < blocks; ++block) {
            float* row = to + (static_cast<size_t>(block) * key_dim + i) * kWide;
            const int first = block * kWide, count = std::min(kWide, value_dim - first);
            if (count == kWide) {
                for (int v = 0; v < kVectors; ++v) _mm256_store_ps(row + 8 * v, _mm256_loadu_ps(from + first + 8 * v));
            } else {
                std::memset(row, 0, kWide * sizeof(float));
                std::memcpy(row, from + first, count * sizeof(float));
            }
        }
}

// Past the caches where that is possible: the weights of a model pass through them before the state is read again.
void write(const float* from, int key_dim, int value_dim, int blocks, float* to) {
    const bool streams = value_dim % kWide == 0 && reinterpret_cast<uintptr_t>(to) % 32 == 0;
    for (int i = 0; i < key_dim; ++i, to += value_dim)
        for (int block = 0; block < blocks; ++block) {
            const float* row = from + (static_cast<size_t>(block) * key_dim + i) * kWide;
            const int first = block * kWide;
            if (streams) {
                for (int v = 0; v < kVectors; ++v) _mm256_stream_ps(to + first + 8 * v, _mm256_load_ps(row + 8 * v));
            } else {
                std::memcpy(to + first, row, std::min(kWide, value_dim - first) * sizeof(float));
            }
        }
}

// S^T k, in two sums that are added at the end: one sum alone would wait for itself.
void times_key(const float* block, const float* key, int key_dim, __m256 (&found)[kVectors]) {
    __m256 even[kVectors], odd[kVectors];
    for (int v = 0; v < kVectors; ++v) even[v] = odd[v] = _mm256_setzero_ps();
    int i = 0;
    for (; i + 2 <= key_dim; i += 2, block += 2 * kWide) {
        const __m256 first = _mm256_broadcast_ss(key + i), second = _mm256_broadcast_ss(key + i + 1);
        for (int v = 0; v < kVectors; ++v) {
            even[v] = _mm256_fmadd_ps(first, _mm256_load_ps(block + 8 * v), even[v]);
            odd[v] = _mm256_fmadd_ps(second, _mm256_load_ps(block + kWide + 8 * v), odd[v]);
        }
    }
    if (i < key_dim)
        for (int v = 0; v < kVectors; ++v)
            even[v] = _mm256_fmadd_ps(_mm256_broadcast_ss(key + i), _mm256_load_ps(block + 8 * v), even[v]);
    for (int v = 0; v < kVectors; ++v) found[v] = _mm256_add_ps(even[v], odd[v]);
}

template <bool wants_output>
void one_row(float* block, const DeltaRow& row, int key_dim, int first, int count) {
    alignas(32) float value[kWide] = {};
    std::memcpy(value, row.value + first, count * sizeof(float));
    const __m256 keep = exponential(_mm256_set1_ps(row.decay)), beta = _mm256_set1_ps(row.beta);
    __m256 delta[kVectors], output[kVectors];
    times_key(block, row.key, key_dim, delta);
    for (int v = 0; v < kVectors; ++v) {
        // What is kept of the state is read: S^T k of the faded state is that of the state, faded.
        const __m256 error = _mm256_sub_ps(_mm256_load_ps(value + 8 * v), _mm256_mul_ps(keep, delta[v]));
        delta[v] = _mm256_mul_ps(beta, error);
        output[v] = _mm256_setzero_ps();
    }
    for (int i = 0; i < key_dim; ++i, block += kWide) {
        const __m256 key = _mm256_broadcast_ss(row.key + i);
        for (int v = 0; v < kVectors; ++v) {
            const __m256 faded = _mm256_mul_ps(keep, _mm256_load_ps(block + 8 * v));
            const __m256 state = _mm256_fmadd_ps(key, delta[v], faded);
            _mm256_store_ps(block + 8 * v, state);
            if (wants_output) output[v] = _mm256_fmadd_ps(_mm256_broadcast_ss(row.query + i), state, output[v]);
        }
    }
    if (!wants_output) return;
    alignas(32) float all[kWide];
    for (int v = 0; v < kVectors; ++v) _mm256_store_ps(all + 8 * v, output[v]);
    std::memcpy(row.output + first, all, count * sizeof(float));
}

void pass_over(float* all, int key_dim, int value_dim, int blocks, const DeltaRun& run) {
    for (int number = 0; number < blocks; ++number) {
        float* block = all + static_cast<size_t>(number) * key_dim * kWide;
        const int first = number * kWide, count = std::min(kWide, value_dim - first);
        for (int place = 0; place < run.count; ++place) {
            const DeltaRow row = run.row_of(run.data, place);
            if (row.output != nullptr)
                one_row<true>(block, row, key_dim, first, count);
            else
                one_row<false>(block, row, key_dim, first, count);
        }
    }
}

}  // namespace

void delta_rows(const float* past, float* present, int key_dim, int value_dim, const DeltaRun& first,
                const DeltaRun& second, bool keeps_second) {
    static thread_local Aligned scratch;
    const int blocks = (value_dim + kWide - 1) / kWide;
    float* all = scratch.at_least(static_cast<size_t>(key_dim) * kWide * blocks);
    read(past, key_dim, value_dim, blocks, all);
    pass_over(all, key_dim, value_dim, blocks, first);
    if (present != nullptr && !keeps_second) write(all, key_dim, value_dim, blocks, present);
    pass_over(all, key_dim, value_dim, blocks, second);
    if (present != nullptr && keeps_second) write(all, key_dim, value_dim, blocks, present);
    _mm_sfence();
}

void unit_row(const float* x, int dim, float factor, float* out) {
    constexpr float epsilon = 1e-6f;
    __m256 squares = _mm256_setzero_ps();
    int i = 0;
    for (; i + 8 <= dim; i += 8) {
        const __m256 values = _mm256_loadu_ps(x + i);
        squares = _mm256_fmadd_ps(values, values, squares);
    }
    alignas(32) float parts[8];
    _mm256_store_ps(parts, squares);
    float sum = ((parts[0] + parts[4]) + (parts[1] + parts[5])) + ((parts[2] + parts[6]) + (parts[3] + parts[7]));
    for (; i < dim; ++i) sum += x[i] * x[i];
    const float scale = factor / std::sqrt(sum + epsilon);
    for (int j = 0; j < dim; ++j) out[j] = x[j] * scale;
}

}  // namespace mtp

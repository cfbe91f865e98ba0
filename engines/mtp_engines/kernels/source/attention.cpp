#include "attention.h"

#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <limits>

#include "exponential.h"

namespace mtp {
namespace {

constexpr int kVector = 8;
constexpr int kLine = 16;      // Numbers of a line of the caches.
constexpr int kRowsAhead = 4;  // The processor's own prefetching stops at each page, which is four rows of 256 numbers.

// A line into the second cache.
void fetch(const float* from, size_t offset) {
    _mm_prefetch(reinterpret_cast<const char*>(from + offset), _MM_HINT_T1);
}

const float* row_of(const float* rows, int row, int width) {
    return rows == nullptr ? rows : rows + static_cast<size_t>(row) * width;
}

// Sums of the lanes of four registers, each in the order ((0+1)+(2+3)) + ((4+5)+(6+7)).
__m128 sums_of(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

float sum_of(__m256 a) { return _mm_cvtss_f32(sums_of(a, a, a, a)); }

// Scores of Q queries and K keys, [query][position]; meanwhile as many rows of `values` are fetched, if it is not nullptr.
template <int Q, int K>
void score(const float* queries, const float* keys, const float* values, int width, float (*scores)[kChunk]) {
    __m256 sums[K][kQueryTile];
    for (int k = 0; k < K; ++k)
        for (int q = 0; q < kQueryTile; ++q) sums[k][q] = _mm256_setzero_ps();
    for (int i = 0; i < width; i += kVector) {
        if (values != nullptr && i % kLine == 0)
            for (int k = 0; k < K; ++k) {
                _mm_prefetch(reinterpret_cast<const char*>(keys + (k + kRowsAhead) * width + i), _MM_HINT_T0);
                fetch(values, static_cast<size_t>(k) * width + i);
            }
        __m256 query[Q];
        for (int q = 0; q < Q; ++q) query[q] = _mm256_loadu_ps(queries + q * width + i);
        for (int k = 0; k < K; ++k) {
            const __m256 key = _mm256_loadu_ps(keys + k * width + i);
            for (int q = 0; q < Q; ++q) sums[k][q] = _mm256_fmadd_ps(query[q], key, sums[k][q]);
        }
    }
    for (int k = 0; k < K; ++k) {
        float found[kQueryTile];
        _mm_storeu_ps(found, sums_of(sums[k][0], sums[k][1], sums[k][2], sums[k][3]));
        for (int q = 0; q < Q; ++q) scores[q][k] = found[q];
    }
}

template <int Q>
void score_all(const float* queries, const float* keys, const float* values, int width, int positions,
               float (*scores)[kChunk]) {
    constexpr int together = Q == 4 ? 2 : 3;
    int k = 0;
    const auto at = [&](int position) { return reinterpret_cast<float(*)[kChunk]>(&scores[0][position]); };
    for (; k + together <= positions; k += together)
        score<Q, together>(queries, row_of(keys, k, width), row_of(values, k, width), width, at(k));
    for (; k < positions; ++k) score<Q, 1>(queries, row_of(keys, k, width), row_of(values, k, width), width, at(k));
}

// Scores become exp(score - greatest), those that are not seen 0.
void soften(float* scores, int visible, int positions, Partial& found) {
    constexpr float lowest = -std::numeric_limits<float>::infinity();
    const int whole = (positions + kVector - 1) / kVector * kVector;
    std::fill(scores + visible, scores + whole, lowest);
    __m256 most = _mm256_set1_ps(lowest);
    for (int i = 0; i < whole; i += kVector) most = _mm256_max_ps(most, _mm256_loadu_ps(scores + i));
    alignas(32) float lanes[kVector];
    _mm256_store_ps(lanes, most);
    found.greatest = *std::max_element(lanes, lanes + kVector);
    const __m256 greatest = _mm256_set1_ps(found.greatest);
    __m256 sum = _mm256_setzero_ps();
    for (int i = 0; i < whole; i += kVector) {
        const __m256 given = _mm256_loadu_ps(scores + i);
        const __m256 seen = _mm256_cmp_ps(given, _mm256_set1_ps(lowest), _CMP_NEQ_UQ);
        const __m256 power = _mm256_and_ps(exponential(_mm256_sub_ps(given, greatest)), seen);
        _mm256_storeu_ps(scores + i, power);
        sum = _mm256_add_ps(sum, power);
    }
    found.sum = sum_of(sum);
}

// Adds N rows of values, weighted, to the sums of Q queries: position after position. Meanwhile N rows of `next` are
// fetched, if it is not nullptr.
template <int Q, int N>
void weigh(const float* values, const float* next, int width, const float (*weights)[kChunk], float* const* sums) {
    __m256 weight[Q][N];
    for (int q = 0; q < Q; ++q)
        for (int n = 0; n < N; ++n) weight[q][n] = _mm256_broadcast_ss(&weights[q][n]);
    for (int i = 0; i < width; i += kVector) {
        if (next != nullptr && i % kLine == 0)
            for (int n = 0; n < N; ++n) fetch(next, static_cast<size_t>(n) * width + i);
        __m256 sum[Q];
        for (int q = 0; q < Q; ++q) sum[q] = _mm256_loadu_ps(sums[q] + i);
        for (int n = 0; n < N; ++n) {
            const __m256 value = _mm256_loadu_ps(values + n * width + i);
            for (int q = 0; q < Q; ++q) sum[q] = _mm256_fmadd_ps(weight[q][n], value, sum[q]);
        }
        for (int q = 0; q < Q; ++q) _mm256_storeu_ps(sums[q] + i, sum[q]);
    }
}

// Positions from `first` on. What a query does not see must not meet it, not even with weight 0: it may not be finite.
template <int Q>
void weigh_all(const float* values, const float* next, int width, int first, int positions,
               const float (*weights)[kChunk], float* const* sums) {
    int n = first;
    const auto at = [&](int position) { return reinterpret_cast<const float(*)[kChunk]>(&weights[0][position]); };
    for (; n + 4 <= positions; n += 4) weigh<Q, 4>(row_of(values, n, width), row_of(next, n, width), width, at(n), sums);
    for (; n < positions; ++n) weigh<Q, 1>(row_of(values, n, width), row_of(next, n, width), width, at(n), sums);
}

}  // namespace

void attend_chunk(const float* queries, int count, const int* visible, const float* keys, const float* values, int width,
                  Partial* const* found, const Ahead& ahead) {
    alignas(32) float scores[kQueryTile][kChunk];
    const int positions = *std::max_element(visible, visible + count);
    switch (count) {
        case 1: score_all<1>(queries, keys, ahead.values, width, positions, scores); break;
        case 2: score_all<2>(queries, keys, ahead.values, width, positions, scores); break;
        case 3: score_all<3>(queries, keys, ahead.values, width, positions, scores); break;
        default: score_all<4>(queries, keys, ahead.values, width, positions, scores); break;
    }
    for (int q = 0; q < count; ++q) {
        std::fill(found[q]->values, found[q]->values + width, 0.f);
        soften(scores[q], std::max(0, visible[q]), positions, *found[q]);
    }
    for (int q = 0; q < count; q += 2) {
        if (q + 1 == count) {
            weigh_all<1>(values, q == 0 ? ahead.next_keys : nullptr, width, 0, visible[q], scores + q, &found[q]->values);
            continue;
        }
        float* sums[2] = {found[q]->values, found[q + 1]->values};
        weigh_all<2>(values, q == 0 ? ahead.next_keys : nullptr, width, 0, visible[q], scores + q, sums);
        weigh_all<1>(values, nullptr, width, visible[q], visible[q + 1], scores + q + 1, sums + 1);
    }
}

void fold(Partial& before, const Partial& next, int width) {
    const float greatest = std::max(before.greatest, next.greatest);
    const float old_factor = exponential(before.greatest - greatest), factor = exponential(next.greatest - greatest);
    const __m256 old_factors = _mm256_set1_ps(old_factor), factors = _mm256_set1_ps(factor);
    before.greatest = greatest;
    before.sum = before.sum * old_factor + next.sum * factor;
    for (int i = 0; i < width; i += kVector) {
        const __m256 old = _mm256_mul_ps(_mm256_loadu_ps(before.values + i), old_factors);
        _mm256_storeu_ps(before.values + i, _mm256_fmadd_ps(_mm256_loadu_ps(next.values + i), factors, old));
    }
}

}  // namespace mtp

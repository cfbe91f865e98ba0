// exp of 8 floats.
#pragma once

#include <immintrin.h>

#include <initializer_list>

namespace mtp {

// To about one unit in the last place, by 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]; 0 below -87.
inline __m256 exponential(__m256 x) {
    const __m256 counts = _mm256_cmp_ps(x, _mm256_set1_ps(-87.f), _CMP_NLT_UQ);
    // The second operand is what comes out for NaN.
    x = _mm256_max_ps(_mm256_set1_ps(-87.f), _mm256_min_ps(_mm256_set1_ps(88.f), x));
    const __m256 n =
        _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 sum = _mm256_set1_ps(1 / 5040.f);
    for (const float factor : {1 / 720.f, 1 / 120.f, 1 / 24.f, 1 / 6.f, 0.5f, 1.f, 1.f})
        sum = _mm256_fmadd_ps(sum, r, _mm256_set1_ps(factor));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(_mm256_mul_ps(sum, _mm256_castsi256_ps(power)), counts);
}

// One of them, by the same arithmetic.
inline float exponential(float x) { return _mm256_cvtss_f32(exponential(_mm256_set1_ps(x))); }

}  // namespace mtp

/* What the kernels on vectors of 512 bits share. */
#include <immintrin.h>

/* e^x to fp32 rounding; 0 far below. */
static inline __m512 exponential(__m512 x) {
    __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693145752f), x);
    f = _mm512_fnmadd_ps(whole, _mm512_set1_ps(1.42860677e-6f), f);
    __m512 y = _mm512_set1_ps(1.0f / 720);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f / 120));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f / 24));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f / 6));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.5f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, whole);
}

/* fp32 to bf16, rounded to nearest even. */
static inline __m256i to_bf16(__m512 x) {
#ifdef TENURE_BF16
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
#endif
}

/* x / (1 + e^-x) */
static inline __m512 silu_of(__m512 x) {
    __m512 below = exponential(_mm512_min_ps(_mm512_sub_ps(_mm512_setzero_ps(), x), _mm512_set1_ps(80.0f)));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), below));
}

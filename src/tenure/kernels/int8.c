/* Products of a few tokens with int8 weights, on integer dot products of vectors (AVX-512 VNNI).
 *
 * Activations are rounded to int8 too, SPAN at a time with a scale of their own, and products of a span are exact
 * integers: no weight is widened, so that memory is the limit. Elsewhere native.c has the same function on plain loops.
 */
#ifdef __AVX512VNNI__
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#define SPAN 64
#define TOKENS 4 /* that share one read of a weight */

/* Rounded activations of some tokens, `spans` a token. The instruction takes one factor without a sign, so weights get 128
 * added; `from` holds what that adds to each lane, negative, for the sums to start from. */
typedef struct {
    int8_t *values;  /* [tokens, spans, SPAN], zeros behind the width */
    int32_t *from;   /* [tokens, spans, 16] */
    float *scales;   /* [tokens, spans] */
    long spans;
} Rounded;

static void round_to_int8(const float *x, long width, Rounded to, long token) {
    for (long b = 0; b < to.spans; b++) {
        const float *in = x + token * width + b * SPAN;
        long at = token * to.spans + b, live = width - b * SPAN < SPAN ? width - b * SPAN : SPAN;
        int8_t *out = to.values + at * SPAN;
        float top = 1e-30f;
        for (long i = 0; i < live; i++) top = fabsf(in[i]) > top ? fabsf(in[i]) : top;
        float inverse = 127.0f / top;
        for (long i = 0; i < live; i++) out[i] = (int8_t)nearbyintf(in[i] * inverse);
        for (long i = live; i < SPAN; i++) out[i] = 0;
        for (long l = 0; l < 16; l++)
            to.from[at * 16 + l] = -128 * (out[4 * l] + out[4 * l + 1] + out[4 * l + 2] + out[4 * l + 3]);
        to.scales[at] = top / 127.0f;
    }
}

static inline __attribute__((always_inline)) void dots(const int tokens, const int8_t *w, Rounded x, long width,
                                                       float *sums) {
    const __m512i offset = _mm512_set1_epi8(-128);
    __m512 total[TOKENS];
    for (int t = 0; t < tokens; t++) total[t] = _mm512_setzero_ps();
    for (long b = 0; b < x.spans; b++) {
        long left = width - b * SPAN;
        __mmask64 live = left < SPAN ? ((__mmask64)1 << left) - 1 : ~(__mmask64)0;
        __m512i weight = _mm512_xor_si512(_mm512_maskz_loadu_epi8(live, w + b * SPAN), offset);
        for (int t = 0; t < tokens; t++) {
            long at = t * x.spans + b;
            __m512i sum = _mm512_dpbusd_epi32(_mm512_loadu_si512(x.from + at * 16), weight,
                                              _mm512_loadu_si512(x.values + at * SPAN));
            total[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(x.scales[at]), total[t]);
        }
    }
    for (int t = 0; t < tokens; t++) sums[t] = _mm512_reduce_add_ps(total[t]);
}

static void row(const int8_t *w, Rounded x, long first, long tokens, long width, float *sums) {
    x.values += first * x.spans * SPAN, x.from += first * x.spans * 16, x.scales += first * x.spans;
    switch (tokens) {
    case 1: dots(1, w, x, width, sums); break;
    case 2: dots(2, w, x, width, sums); break;
    case 3: dots(3, w, x, width, sums); break;
    default: dots(4, w, x, width, sums);
    }
}

static inline float silu(float v) { return v / (1.0f + expf(v < -80.0f ? 80.0f : -v)); }

/* See native.c. */
void tenure_linear_i8(const int8_t *w, const float *scale, const float *bias, const float *x, float *y, long tokens,
                      long outputs, long width, int add, int gated) {
    long half = gated ? outputs / 2 : outputs, spans = (width + SPAN - 1) / SPAN, all = tokens * spans;
    char *room = aligned_alloc(64, (size_t)((all * (SPAN + 64 + 4) + 63) / 64 * 64));
    Rounded rounded = {(int8_t *)room, (int32_t *)(room + all * SPAN), (float *)(room + all * (SPAN + 64)), spans};
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (long t = 0; t < tokens; t++) round_to_int8(x, width, rounded, t);
#pragma omp for schedule(static)
        for (long o = 0; o < half; o++) {
            float s[TOKENS], p[TOKENS];
            for (long t = 0, n; t < tokens; t += n) {
                n = tokens - t < TOKENS ? tokens - t : TOKENS;
                row(w + o * width, rounded, t, n, width, s);
                if (gated) row(w + (half + o) * width, rounded, t, n, width, p);
                for (long k = 0; k < n; k++) {
                    float v = s[k] * scale[o] + (bias ? bias[o] : 0.0f);
                    if (gated) v = silu(v) * (p[k] * scale[half + o] + (bias ? bias[half + o] : 0.0f));
                    float *out = y + (t + k) * half + o;
                    *out = add ? *out + v : v;
                }
            }
        }
    }
    free(room);
}

/* Activations to a scale; 0 where they stay fp32. */
int tenure_int8_span(void) { return SPAN; }
#else
int tenure_int8_span(void) { return 0; }
#endif

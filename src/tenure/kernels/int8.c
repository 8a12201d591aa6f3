/* Products with int8 weights, on integer dot products of vectors (AVX-512 VNNI).
 *
 * Activations are rounded to int8 too, SPAN at a time with a scale of their own, and products of a span are exact
 * integers. No weight is widened: memory is the limit for a few tokens, and many take half the time of bf16 products.
 * Elsewhere native.c has the function for a few on plain loops.
 */
#include "isa.h"
#ifdef TENURE_VNNI
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

#define SPAN 64
#define TOKENS 4 /* that share one read of a weight */

/* Rounds a span. The instruction takes one factor without a sign, so weights get 128 added; returns what that adds to each
 * lane, negative, for sums to start from. */
static inline __m512i round_span(const __m512 *x, int8_t *values, float *scale) {
    /* As integers, which order sizes alike, a number that is none is the largest: the scale shows it, a rounded value could not. */
    __m512i top = _mm512_castps_si512(_mm512_set1_ps(1e-30f));
    for (int i = 0; i < SPAN / 16; i++) top = _mm512_max_epi32(top, _mm512_castps_si512(_mm512_abs_ps(x[i])));
    int bits = _mm512_reduce_max_epi32(top);
    float largest;
    memcpy(&largest, &bits, sizeof bits);
    __m512 inverse = _mm512_set1_ps(127.0f / largest);
    for (int i = 0; i < SPAN / 16; i++) {
        __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(x[i], inverse));
        _mm_storeu_si128((__m128i *)(values + 16 * i), _mm512_cvtepi32_epi8(whole));
    }
    *scale = largest / 127.0f;
    __m512i added = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(-128), _mm512_loadu_si512(values));
    return _mm512_sub_epi32(_mm512_setzero_si512(), added);
}

static inline __mmask16 live_of(long left) {
    return left >= 16 ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
}

/* A few tokens. */

typedef struct {
    int8_t *values;  /* [tokens, spans, SPAN], zeros behind the width */
    int32_t *from;   /* [tokens, spans, 16] */
    float *scales;   /* [tokens, spans] */
    long spans;
} Rounded;

static void round_token(const float *x, long width, Rounded to, long token) {
    for (long b = 0; b < to.spans; b++) {
        long at = token * to.spans + b;
        __m512 span[SPAN / 16];
        for (int i = 0; i < SPAN / 16; i++) {
            long first = b * SPAN + 16 * i;
            span[i] = _mm512_maskz_loadu_ps(live_of(width - first), x + token * width + first);
        }
        _mm512_storeu_si512(to.from + at * 16, round_span(span, to.values + at * SPAN, to.scales + at));
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
        for (long t = 0; t < tokens; t++) round_token(x, width, rounded, t);
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

/* Many tokens: tiles of ROWS of them by 32 outputs. */

#define ROWS 6     /* with 32 outputs: 12 sums of a span and 12 of all in registers */
#define BLOCK 1024 /* tokens to a packing of the weights */

/* Weights of two runs of 16 rows, with 128 added, as [width / 4][run][16][4]: a load gives four products of 16 outputs. */
static void pack(const int8_t *const *runs, const long *counts, long width, long spans, uint8_t *to) {
    memset(to, 128, (size_t)(spans * SPAN * 32));
    for (long run = 0; run < 2; run++)
        for (long o = 0; o < counts[run]; o++) {
            const int8_t *w = runs[run] + o * width;
            uint8_t *at = to + (run * 16 + o) * 4;
            long i = 0;
            for (; i + 4 <= width; i += 4, at += 128) {
                uint32_t four;
                memcpy(&four, w + i, 4);
                four ^= 0x80808080u;
                memcpy(at, &four, 4);
            }
            for (long k = 0; i + k < width; k++) at[k] = (uint8_t)(w[i + k] ^ 0x80);
        }
}

/* Sums [rows][run][16] of packed weights; `from` holds what the added 128 amount to, negative, once a span. */
static inline __attribute__((always_inline)) void tile(const int rows, const uint8_t *w, const int8_t *x,
                                                       const float *scales, const int32_t *from, long spans,
                                                       float *sums) {
    __m512 total[ROWS][2];
    for (int r = 0; r < rows; r++) total[r][0] = total[r][1] = _mm512_setzero_ps();
    for (long b = 0; b < spans; b++) {
        __m512i part[ROWS][2];
        for (int r = 0; r < rows; r++) part[r][0] = part[r][1] = _mm512_set1_epi32(from[r * spans + b]);
#pragma GCC unroll 4
        for (long k = 0; k < SPAN; k += 4, w += 128) {
            __m512i one = _mm512_loadu_si512(w), other = _mm512_loadu_si512(w + 64);
            for (int r = 0; r < rows; r++) {
                int four;
                memcpy(&four, x + (r * spans + b) * SPAN + k, 4);
                __m512i value = _mm512_set1_epi32(four);
                part[r][0] = _mm512_dpbusd_epi32(part[r][0], one, value);
                part[r][1] = _mm512_dpbusd_epi32(part[r][1], other, value);
            }
        }
        for (int r = 0; r < rows; r++) {
            __m512 scale = _mm512_set1_ps(scales[r * spans + b]);
            total[r][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[r][0]), scale, total[r][0]);
            total[r][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[r][1]), scale, total[r][1]);
        }
    }
    for (int r = 0; r < rows; r++) {
        _mm512_storeu_ps(sums + r * 32, total[r][0]);
        _mm512_storeu_ps(sums + r * 32 + 16, total[r][1]);
    }
}

static void tiles(long rows, const uint8_t *w, const int8_t *x, const float *scales, const int32_t *from, long spans,
                  float *sums) {
    switch (rows) {
    case 6: tile(6, w, x, scales, from, spans, sums); break;
    case 5: tile(5, w, x, scales, from, spans, sums); break;
    case 4: tile(4, w, x, scales, from, spans, sums); break;
    case 3: tile(3, w, x, scales, from, spans, sums); break;
    case 2: tile(2, w, x, scales, from, spans, sums); break;
    default: tile(1, w, x, scales, from, spans, sums);
    }
}

static void round_row(const uint16_t *x, long width, long spans, int8_t *values, int32_t *from, float *scales) {
    for (long b = 0; b < spans; b++) {
        __m512 span[SPAN / 16];
        for (int i = 0; i < SPAN / 16; i++) {
            long first = b * SPAN + 16 * i;
            __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(live_of(width - first), x + first));
            span[i] = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
        }
        from[b] = _mm512_reduce_add_epi32(round_span(span, values + b * SPAN, scales + b));
    }
}

/* y[t, o] = scale[o] * W[o] x[t] + bias[o] of many tokens. x, y: bf16. gated as in native.c. */
void tenure_product_i8(const int8_t *w, const float *scale, const float *bias, const uint16_t *x, uint16_t *y, long tokens,
                       long outputs, long width, int gated) {
    long half = gated ? outputs / 2 : outputs, made = gated ? 16 : 32, spans = (width + SPAN - 1) / SPAN;
    long panels = (half + made - 1) / made, blocks = (tokens + BLOCK - 1) / BLOCK, row = spans * SPAN;
    int8_t *values = aligned_alloc(64, (size_t)(tokens * row));
    int32_t *from = malloc((size_t)(tokens * spans) * sizeof *from);
    float *scales = malloc((size_t)(tokens * spans) * sizeof *scales);
#pragma omp parallel
    {
        uint8_t *packed = aligned_alloc(64, (size_t)(row * 32));
#pragma omp for schedule(static)
        for (long t = 0; t < tokens; t++)
            round_row(x + t * width, width, spans, values + t * row, from + t * spans, scales + t * spans);
#pragma omp for schedule(static) collapse(2)
        for (long block = 0; block < blocks; block++)
            for (long panel = 0; panel < panels; panel++) {
                long first = panel * made, second = gated ? half + first : first + 16, left = half - first;
                long counts[2] = {left < 16 ? left : 16, 0};
                counts[1] = gated ? counts[0] : left <= 16 ? 0 : left < 32 ? left - 16 : 16;
                __mmask16 live[2] = {live_of(counts[0]), live_of(counts[1])};
                const int8_t *runs[2] = {w + first * width, w + second * width};
                __m512 by[2], offset[2];
                for (int run = 0; run < 2; run++) {
                    long o = run ? second : first;
                    by[run] = _mm512_maskz_loadu_ps(live[run], scale + o);
                    offset[run] = bias ? _mm512_maskz_loadu_ps(live[run], bias + o) : _mm512_setzero_ps();
                }
                pack(runs, counts, width, spans, packed);
                long end = (block + 1) * BLOCK < tokens ? (block + 1) * BLOCK : tokens;
                for (long t = block * BLOCK, n; t < end; t += n) {
                    float sums[ROWS * 32];
                    n = end - t < ROWS ? end - t : ROWS;
                    tiles(n, packed, values + t * row, scales + t * spans, from + t * spans, spans, sums);
                    for (long k = 0; k < n; k++) {
                        uint16_t *to = y + (t + k) * half + first;
                        __m512 one = _mm512_fmadd_ps(_mm512_loadu_ps(sums + k * 32), by[0], offset[0]);
                        __m512 other = _mm512_fmadd_ps(_mm512_loadu_ps(sums + k * 32 + 16), by[1], offset[1]);
                        if (gated) one = _mm512_mul_ps(silu_of(one), other);
                        _mm256_mask_storeu_epi16(to, live[0], to_bf16(one));
                        if (!gated) _mm256_mask_storeu_epi16(to + 16, live[1], to_bf16(other));
                    }
                }
            }
        free(packed);
    }
    free(values), free(from), free(scales);
}

/* Activations to a scale; 0 where they stay fp32. */
int tenure_int8_span(void) { return SPAN; }
#else
int tenure_int8_span(void) { return 0; }
#endif

/* Attention of many queries on CPUs with AVX-512 bf16 products: blocked softmax(Q K^T) V with its log-sum-exp.
 *
 * One pass over keys for each block of queries, with a running maximum (FlashAttention, arXiv 2205.14135). Logits, sums
 * and output are fp32; products take bf16 pairs. Keys and values are first packed so that one load gives 16 columns of
 * a pair: keys [panel of 64][dim / 2][64][2], values [block of 64 dims][rows / 2][64][2].
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512BF16__
#include <immintrin.h>

#define TILE 6     /* rows of a product held in registers: 6 x 64 sums */
#define QUERIES 48 /* of a task */
#define KEYS 256   /* of a step */
#define MAX_DIM 256
#define LOWEST -3.0e38f /* stands for minus infinity, which -ffast-math knows nothing of */

int tenure_can_attend(void) { return MAX_DIM; }

/* C [rows, 64] (+)= A [rows, pairs] B [pairs, 64], A and B of bf16 pairs. */
static inline __attribute__((always_inline)) void tile(const int rows, long pairs, const uint32_t *a, long a_row,
                                                       const uint32_t *b, float *c, long c_row, const int add) {
    __m512 sum[TILE][4];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 4; j++) sum[r][j] = add ? _mm512_loadu_ps(c + r * c_row + 16 * j) : _mm512_setzero_ps();
    for (long p = 0; p < pairs; p++) {
        __m512bh column[4];
        for (int j = 0; j < 4; j++) column[j] = (__m512bh)_mm512_loadu_si512(b + p * 64 + 16 * j);
        for (int r = 0; r < rows; r++) {
            __m512bh pair = (__m512bh)_mm512_set1_epi32((int)a[r * a_row + p]);
            for (int j = 0; j < 4; j++) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], pair, column[j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 4; j++) _mm512_storeu_ps(c + r * c_row + 16 * j, sum[r][j]);
}

static inline __attribute__((always_inline)) void product(long rows, long pairs, const uint32_t *a, long a_row,
                                                          const uint32_t *b, float *c, long c_row, const int add) {
    for (; rows >= TILE; rows -= TILE, a += TILE * a_row, c += TILE * c_row)
        tile(TILE, pairs, a, a_row, b, c, c_row, add);
    for (; rows >= 2; rows -= 2, a += 2 * a_row, c += 2 * c_row) tile(2, pairs, a, a_row, b, c, c_row, add);
    if (rows) tile(1, pairs, a, a_row, b, c, c_row, add);
}

/* e^x to fp32 rounding for x <= 0; 0 far below. */
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

/* One row of logits, of which the first `seen` count, becomes `width` bf16 weights. Takes the running maximum and sum
 * along and returns what the earlier output has to be multiplied by. */
static inline float weigh(const float *logits, uint16_t *weights, long seen, long width, float scale, float *top,
                          float *sum) {
    const __m512 low = _mm512_set1_ps(LOWEST);
    __m512 best = low;
    for (long j = 0; j < seen; j += 16) {
        __mmask16 live = seen - j >= 16 ? 0xffff : (__mmask16)((1u << (seen - j)) - 1);
        best = _mm512_max_ps(best, _mm512_mask_loadu_ps(low, live, logits + j));
    }
    float now = _mm512_reduce_max_ps(best) * scale, factor = 1.0f;
    if (now > *top) {
        factor = expf(*top - now);
        *top = now;
    }
    __m512 total = _mm512_setzero_ps(), by = _mm512_set1_ps(scale), shift = _mm512_set1_ps(*top);
    for (long j = 0; j < width; j += 32) {
        __m512 part[2];
        for (int h = 0; h < 2; h++) {
            long left = seen - j - 16 * h;
            __mmask16 live = left >= 16 ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
            __m512 x = _mm512_maskz_loadu_ps(live, logits + j + 16 * h);
            part[h] = _mm512_maskz_mov_ps(live, exponential(_mm512_fmsub_ps(x, by, shift)));
            total = _mm512_add_ps(total, part[h]);
        }
        _mm512_storeu_si512(weights + j, (__m512i)_mm512_cvtne2ps_pbh(part[1], part[0]));
    }
    *sum = *sum * factor + _mm512_reduce_add_ps(total);
    return factor;
}

/* q: [kv_heads * group, n, dim] with strides, k, v: [kv_heads, m, dim] with strides, all bf16.
 * Query i sees the keys 0 .. first + i. out: bf16 [kv_heads * group, n, dim], lse: fp32 [kv_heads * group, n].
 * pack: room for 2 * kv_heads * padded * dim / 2 words, padded = m rounded up to KEYS. */
void tenure_attend(const uint16_t *q, const uint16_t *k, const uint16_t *v, uint16_t *out, float *lse, uint32_t *pack,
                   long kv_heads, long group, long n, long m, long dim, long q_head, long q_row, long k_head,
                   long k_row, long v_head, long v_row, long first, float scale) {
    long padded = (m + KEYS - 1) / KEYS * KEYS, pairs = dim / 2, words = padded * pairs;
    uint32_t *keys = pack, *values = pack + kv_heads * words;
    long blocks = (n + QUERIES - 1) / QUERIES, panels = padded / 64;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (long t = 0; t < kv_heads * panels; t++) {
            long head = t / panels, panel = t % panels;
            uint32_t *to = keys + head * words + panel * 64 * pairs;
            for (long c = 0; c < 64; c++) {
                long row = panel * 64 + c;
                const uint16_t *from = k + head * k_head + row * k_row;
                for (long p = 0; p < pairs; p++) {
                    uint32_t pair = 0;
                    if (row < m) memcpy(&pair, from + 2 * p, 4);
                    to[p * 64 + c] = pair;
                }
            }
            for (long r = panel * 32; r < panel * 32 + 32; r++) {
                const uint16_t *a = v + head * v_head + 2 * r * v_row, *b = a + v_row;
                for (long c = 0; c < dim; c++) {
                    uint32_t low = 2 * r < m ? a[c] : 0, high = 2 * r + 1 < m ? b[c] : 0;
                    values[head * words + c / 64 * (padded / 2 * 64) + r * 64 + c % 64] = low | high << 16;
                }
            }
        }
#pragma omp for schedule(dynamic, 1)
        for (long t = 0; t < kv_heads * group * blocks; t++) {
            /* Later queries see more keys: they are taken first. */
            long block = blocks - 1 - t / (kv_heads * group), head = t % (kv_heads * group), kv = head / group;
            long start = block * QUERIES, rows = n - start < QUERIES ? n - start : QUERIES;
            float logits[QUERIES * KEYS] __attribute__((aligned(64))), sums[QUERIES * MAX_DIM];
            uint16_t weights[QUERIES * KEYS] __attribute__((aligned(64)));
            float top[QUERIES], sum[QUERIES];
            uint32_t query[QUERIES * MAX_DIM / 2];
            for (long r = 0; r < rows; r++) {
                memcpy(query + r * pairs, q + head * q_head + (start + r) * q_row, (size_t)dim * 2);
                top[r] = LOWEST;
                sum[r] = 0.0f;
            }
            memset(sums, 0, sizeof(float) * (size_t)(rows * dim));
            long end = first + start + rows < m ? first + start + rows : m;
            for (long at = 0; at < end; at += KEYS) {
                long width = end - at < KEYS ? (end - at + 63) / 64 * 64 : KEYS;
                for (long panel = 0; panel < width; panel += 64)
                    product(rows, pairs, query, pairs, keys + kv * words + (at + panel) * pairs, logits + panel, KEYS, 0);
                for (long r = 0; r < rows; r++) {
                    long seen = first + start + r + 1 - at;
                    seen = seen > m - at ? m - at : seen;
                    seen = seen > width ? width : seen;
                    if (seen <= 0) {
                        memset(weights + r * KEYS, 0, (size_t)width * 2);
                        continue;
                    }
                    float factor = weigh(logits + r * KEYS, weights + r * KEYS, seen, width, scale, top + r, sum + r);
                    if (factor != 1.0f)
                        for (long c = 0; c < dim; c++) sums[r * dim + c] *= factor;
                }
                for (long c = 0; c < dim; c += 64)
                    product(rows, width / 2, (uint32_t *)weights, KEYS / 2,
                            values + kv * words + c / 64 * (padded / 2 * 64) + at / 2 * 64, sums + c, dim, 1);
            }
            for (long r = 0; r < rows; r++) {
                float inverse = 1.0f / sum[r];
                uint16_t *to = out + (head * n + start + r) * dim;
                for (long c = 0; c < dim; c += 32) {
                    __m512 low = _mm512_mul_ps(_mm512_loadu_ps(sums + r * dim + c), _mm512_set1_ps(inverse));
                    __m512 high = _mm512_mul_ps(_mm512_loadu_ps(sums + r * dim + c + 16), _mm512_set1_ps(inverse));
                    _mm512_storeu_si512(to + c, (__m512i)_mm512_cvtne2ps_pbh(high, low));
                }
                lse[head * n + start + r] = top[r] + logf(sum[r]);
            }
        }
    }
}
#else
int tenure_can_attend(void) { return 0; }
#endif

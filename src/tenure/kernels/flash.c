/* Kernels for CPUs with AVX-512 bf16 products.
 *
 * Attention of many queries: blocked softmax(Q K^T) V with its log-sum-exp. Products of a weight with some tens of tokens.
 *
 * One pass over keys for each block of queries, with a running maximum (FlashAttention, arXiv 2205.14135). Logits, sums
 * and output are fp32; products take bf16 pairs. Keys and values are first packed so that one load gives 16 columns of
 * a pair: keys [panel of 64][dim / 2][64][2], values [block of 64 dims][rows / 2][64][2].
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "isa.h"
#ifdef TENURE_BF16
#include "vectors.h"

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

/* Rows of 16 words become columns. */
static inline void transpose(__m512i *r) {
    __m512i t[16], u[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int c = 0; c < 4; c++) {
        __m512i a = _mm512_shuffle_i32x4(u[c], u[4 + c], 0x88), b = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0x88);
        __m512i d = _mm512_shuffle_i32x4(u[c], u[4 + c], 0xdd), e = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0xdd);
        r[c] = _mm512_shuffle_i32x4(a, b, 0x88);
        r[8 + c] = _mm512_shuffle_i32x4(a, b, 0xdd);
        r[4 + c] = _mm512_shuffle_i32x4(d, e, 0x88);
        r[12 + c] = _mm512_shuffle_i32x4(d, e, 0xdd);
    }
}

/* A panel of 64 keys from row `start` on, as columns of pairs; zeros past row m. */
static inline void pack_keys(const uint16_t *k, long k_row, long start, long m, long pairs, uint32_t *to) {
    for (long c = 0; c < 64; c += 16)
        for (long p = 0; p < pairs; p += 16) {
            __m512i block[16];
            for (long r = 0; r < 16; r++)
                block[r] = start + c + r < m ? _mm512_loadu_si512(k + (start + c + r) * k_row + 2 * p)
                                             : _mm512_setzero_si512();
            transpose(block);
            for (long r = 0; r < 16; r++) _mm512_storeu_si512(to + (p + r) * 64 + c, block[r]);
        }
}

/* Two rows of values as pairs, blocks of 64 dims `block` words apart. */
static inline void pack_values(const uint16_t *a, const uint16_t *b, long dim, uint32_t *to, long block) {
    const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                           37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    for (long c = 0; c < dim; c += 32) {
        __m512i low = a ? _mm512_loadu_si512(a + c) : _mm512_setzero_si512();
        __m512i high = b ? _mm512_loadu_si512(b + c) : _mm512_setzero_si512();
        uint32_t *at = to + c / 64 * block + c % 64;
        _mm512_storeu_si512(at, _mm512_permutex2var_epi16(low, first, high));
        _mm512_storeu_si512(at + 16, _mm512_permutex2var_epi16(low, second, high));
    }
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
            pack_keys(k + head * k_head, k_row, panel * 64, m, pairs, keys + head * words + panel * 64 * pairs);
            for (long r = panel * 32; r < panel * 32 + 32; r++) {
                const uint16_t *row = v + head * v_head + 2 * r * v_row;
                pack_values(2 * r < m ? row : NULL, 2 * r + 1 < m ? row + v_row : NULL, dim,
                            values + head * words + r * 64, padded / 2 * 64);
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

/* Words of scratch of tenure_extend for each of kv_heads * parts tasks. */
long tenure_extend_words(long rows, long width, long dim) { return rows * (width + dim + dim / 2 + 2); }

/* tenure_attend for few queries, which are the last n of the m keys, with the mass that each key received from the last `window`
 * queries, fp32 [kv_heads * group, m], or NULL.
 *
 * Keys are cut into `parts` of `width` (a multiple of 64), each with a softmax of its own, and joined by their log-sum-exps. A
 * thread packs what it multiplies: cores that share no cache read each other's packed keys slowly. */
void tenure_extend(const uint16_t *q, const uint16_t *k, const uint16_t *v, uint16_t *out, float *lse, float *mass,
                   float *scratch, long parts, long width, long kv_heads, long group, long n, long m, long dim,
                   long q_head, long q_row, long k_head, long k_row, long v_head, long v_row, long window, float scale) {
    long rows = group * n, pairs = dim / 2, each = tenure_extend_words(rows, width, dim);
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (long task = 0; task < kv_heads * parts; task++) {
            long g = task / parts, start = task % parts * width, stop = start + width < m ? start + width : m;
            float *p = scratch + task * each, *sums = p + rows * width, *tops = sums + rows * dim, *totals = tops + rows;
            uint32_t *query = (uint32_t *)(totals + rows), pack[KEYS * MAX_DIM / 2];
            uint16_t weights[QUERIES * KEYS] __attribute__((aligned(64)));
            for (long r = 0; r < rows; r++)
                memcpy(query + r * pairs, q + (g * group + r / n) * q_head + r % n * q_row, (size_t)dim * 2);
            for (long at = start; at < stop; at += KEYS)
                for (long panel = at; panel < stop && panel < at + KEYS; panel += 64) {
                    pack_keys(k + g * k_head, k_row, panel, m, pairs, pack);
                    product(rows, pairs, query, pairs, pack, p + panel - start, width, 0);
                }
            for (long r = 0; r < rows; r++) {
                float *x = p + r * width;
                long seen = m - n + r % n + 1 - start;
                seen = seen < 0 ? 0 : seen < stop - start ? seen : stop - start;
                __m512 best = _mm512_set1_ps(LOWEST), total = _mm512_setzero_ps(), by = _mm512_set1_ps(scale);
                for (long j = 0; j < seen; j += 16) {
                    __mmask16 live = seen - j >= 16 ? 0xffff : (__mmask16)((1u << (seen - j)) - 1);
                    best = _mm512_max_ps(best, _mm512_mask_loadu_ps(best, live, x + j));
                }
                tops[r] = seen ? _mm512_reduce_max_ps(best) * scale : LOWEST;
                __m512 shift = _mm512_set1_ps(tops[r]);
                for (long j = 0; j < width; j += 16) {
                    long left = seen - j;
                    __mmask16 live = left >= 16 ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
                    __m512 e = exponential(_mm512_fmsub_ps(_mm512_maskz_loadu_ps(live, x + j), by, shift));
                    e = _mm512_maskz_mov_ps(live, e);
                    total = _mm512_add_ps(total, e);
                    _mm512_storeu_ps(x + j, e);
                }
                totals[r] = _mm512_reduce_add_ps(total);
            }
            if (start >= stop) memset(sums, 0, sizeof(float) * (size_t)(rows * dim));
            for (long at = start; at < stop; at += KEYS) {
                long now = start + width - at < KEYS ? start + width - at : KEYS;
                for (long j = 0; j < now; j += 2) {
                    const uint16_t *row = v + g * v_head + (at + j) * v_row;
                    pack_values(at + j < m ? row : NULL, at + j + 1 < m ? row + v_row : NULL, dim, pack + j / 2 * 64,
                                KEYS / 2 * 64);
                }
                for (long r = 0; r < rows; r += QUERIES) {
                    long count = rows - r < QUERIES ? rows - r : QUERIES;
                    for (long i = 0; i < count; i++)
                        for (long j = 0; j < now; j += 32) {
                            const float *x = p + (r + i) * width + at - start + j;
                            _mm512_store_si512(weights + i * KEYS + j, (__m512i)_mm512_cvtne2ps_pbh(
                                                                           _mm512_loadu_ps(x + 16), _mm512_loadu_ps(x)));
                        }
                    for (long c = 0; c < dim; c += 64)
                        product(count, now / 2, (uint32_t *)weights, KEYS / 2, pack + c / 64 * (KEYS / 2 * 64),
                                sums + r * dim + c, dim, at > start);
                }
            }
        }
#pragma omp for schedule(static)
        for (long task = 0; task < kv_heads * parts; task++) {
            long g = task / parts, part = task % parts, start = part * width;
            long stop = start + width < m ? start + width : m;
            const float *p = scratch + task * each;
            for (long r = 0; r < rows; r++) {
                long head = g * group + r / n, i = r % n;
                float top = LOWEST, total = 0.0f, own = 0.0f;
                for (long o = 0; o < parts; o++) {
                    float other = (scratch + (g * parts + o) * each)[rows * (width + dim) + r];
                    top = other > top ? other : top;
                }
                for (long o = 0; o < parts; o++) {
                    const float *tops = scratch + (g * parts + o) * each + rows * (width + dim);
                    float by = tops[r] < top - 80.0f ? 0.0f : expf(tops[r] - top);
                    total += by * tops[rows + r];
                    own = o == part ? by : own;
                }
                own /= total;
                if (mass && start < stop) {
                    float *to = mass + head * m + start;
                    if (i == 0) memset(to, 0, sizeof(float) * (size_t)(stop - start));
                    if (i >= n - window)
                        for (long j = 0; j < stop - start; j++) to[j] += own * p[r * width + j];
                }
                if (r % parts != part) continue;
                lse[head * n + i] = top + logf(total);
                for (long c = 0; c < dim; c += 32) {
                    __m512 low = _mm512_setzero_ps(), high = low;
                    for (long o = 0; o < parts; o++) {
                        const float *from = scratch + (g * parts + o) * each + rows * width, *tops = from + rows * dim;
                        float share = tops[r] < top - 80.0f ? 0.0f : expf(tops[r] - top) / total;
                        low = _mm512_fmadd_ps(_mm512_loadu_ps(from + r * dim + c), _mm512_set1_ps(share), low);
                        high = _mm512_fmadd_ps(_mm512_loadu_ps(from + r * dim + c + 16), _mm512_set1_ps(share), high);
                    }
                    _mm512_storeu_si512(out + (head * n + i) * dim + c, (__m512i)_mm512_cvtne2ps_pbh(high, low));
                }
            }
        }
    }
}

/* Softmax mass that each key received from the n queries that end at the last key: mass[h, j] = sum_i exp(q_i k_j scale - lse_i),
 * query i sees the keys 0 .. m - n + i. q, k as above, lse: [heads, n], mass: [heads, m], both fp32. */
void tenure_mass(const uint16_t *q, const uint16_t *k, const float *lse, float *mass, long kv_heads, long group, long n,
                 long m, long dim, long q_head, long q_row, long k_head, long k_row, float scale) {
    long blocks = (m + KEYS - 1) / KEYS, pairs = dim / 2;
#pragma omp parallel for schedule(dynamic, 1)
    for (long t = 0; t < kv_heads * blocks; t++) {
        long kv = t / blocks, at = t % blocks * KEYS, width = m - at < KEYS ? m - at : KEYS;
        uint32_t keys[KEYS * MAX_DIM / 2], query[QUERIES * MAX_DIM / 2];
        float logits[QUERIES * KEYS] __attribute__((aligned(64))), sums[KEYS] __attribute__((aligned(64)));
        for (long panel = 0; panel < width; panel += 64)
            pack_keys(k + kv * k_head, k_row, at + panel, m, pairs, keys + panel * pairs);
        for (long head = kv * group; head < (kv + 1) * group; head++) {
            memset(sums, 0, sizeof sums);
            for (long start = 0; start < n; start += QUERIES) {
                long rows = n - start < QUERIES ? n - start : QUERIES;
                for (long r = 0; r < rows; r++)
                    memcpy(query + r * pairs, q + head * q_head + (start + r) * q_row, (size_t)dim * 2);
                for (long panel = 0; panel < width; panel += 64)
                    product(rows, pairs, query, pairs, keys + panel * pairs, logits + panel, KEYS, 0);
                for (long r = 0; r < rows; r++) {
                    long seen = m - n + start + r + 1 - at;
                    seen = seen > width ? width : seen;
                    __m512 by = _mm512_set1_ps(scale), shift = _mm512_set1_ps(lse[head * n + start + r]);
                    for (long j = 0; j < seen; j += 16) {
                        __mmask16 live = seen - j >= 16 ? 0xffff : (__mmask16)((1u << (seen - j)) - 1);
                        __m512 x = _mm512_maskz_loadu_ps(live, logits + r * KEYS + j);
                        __m512 p = _mm512_maskz_mov_ps(live, exponential(_mm512_fmsub_ps(x, by, shift)));
                        _mm512_store_ps(sums + j, _mm512_add_ps(_mm512_load_ps(sums + j), p));
                    }
                }
            }
            memcpy(mass + head * m + at, sums, sizeof(float) * (size_t)width);
        }
    }
}

/* Sums of 16 vectors, in order. */
static inline __m512 sums_of(__m512 *v) {
    __m512 a[8], b[4], c[2];
    for (int i = 0; i < 8; i++) /* of vectors 2i and 2i + 1, in turn */
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; i++) /* of vectors 4i .. 4i + 3, in each quarter */
        b[i] = (__m512)_mm512_add_ps((__m512)_mm512_unpacklo_pd((__m512d)a[2 * i], (__m512d)a[2 * i + 1]),
                                     (__m512)_mm512_unpackhi_pd((__m512d)a[2 * i], (__m512d)a[2 * i + 1]));
    for (int i = 0; i < 2; i++)
        c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}

#define FETCH 64 /* rows that are fetched, into the second cache, before they are needed */

static inline __m512 widened(const uint16_t *from) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
}

/* Logits of `group` fp32 queries [group, dim] on the keys [.., dim] of rows start .. stop, sixteen at a time:
 * to[m * stride + j]. A query is taken as the sum of two bf16 numbers. Returns the first row that is left. */
long tenure_logits(const uint16_t *keys, const float *query, float *to, long stride, long start, long stop, long group,
                   long dim) {
    uint16_t high[16 * MAX_DIM] __attribute__((aligned(64))), low[16 * MAX_DIM] __attribute__((aligned(64)));
    if (dim % 32 || dim > MAX_DIM || group > 16) return start;
    for (long i = 0; i < group * dim; i += 16) {
        __m512 q = _mm512_loadu_ps(query + i);
        __m256i rounded = (__m256i)_mm512_cvtneps_pbh(q);
        _mm256_store_si256((__m256i *)(high + i), rounded);
        q = _mm512_sub_ps(q, widened(high + i));
        _mm256_store_si256((__m256i *)(low + i), (__m256i)_mm512_cvtneps_pbh(q));
    }
    for (; start + 16 <= stop; start += 16) {
        const uint16_t *rows = keys + start * dim;
        for (long i = 0; i < 16 * dim; i += 32) _mm_prefetch((const char *)(rows + FETCH * dim + i), _MM_HINT_T1);
        for (long m = 0; m < group; m++) {
            __m512 sum[16];
            for (int r = 0; r < 16; r++) sum[r] = _mm512_setzero_ps();
            for (long c = 0; c < dim; c += 32) {
                __m512bh h = (__m512bh)_mm512_load_si512(high + m * dim + c), l = (__m512bh)_mm512_load_si512(low + m * dim + c);
                for (int r = 0; r < 16; r++) {
                    __m512bh key = (__m512bh)_mm512_loadu_si512(rows + r * dim + c);
                    sum[r] = _mm512_dpbf16_ps(_mm512_dpbf16_ps(sum[r], l, key), h, key);
                }
            }
            _mm512_storeu_ps(to + m * stride + start, sums_of(sum));
        }
    }
    return start;
}

/* 64 dims of values, weighted for `heads` heads, whose sums stay in registers. */
static inline __attribute__((always_inline)) void weighted(const int heads, const uint16_t *values, const float *p,
                                                           float *sums, long stride, long start, long stop, long dim) {
    __m512 sum[7][4];
    for (int m = 0; m < heads; m++)
        for (int c = 0; c < 4; c++) sum[m][c] = _mm512_loadu_ps(sums + m * dim + 16 * c);
    for (long j = start; j < stop; j++) {
        _mm_prefetch((const char *)(values + (j + FETCH) * dim), _MM_HINT_T1);
        _mm_prefetch((const char *)(values + (j + FETCH) * dim + 32), _MM_HINT_T1);
        for (int c = 0; c < 4; c++) {
            __m512 value = widened(values + j * dim + 16 * c);
            for (int m = 0; m < heads; m++)
                sum[m][c] = _mm512_fmadd_ps(value, _mm512_set1_ps(p[m * stride + j]), sum[m][c]);
        }
    }
    for (int m = 0; m < heads; m++)
        for (int c = 0; c < 4; c++) _mm512_storeu_ps(sums + m * dim + 16 * c, sum[m][c]);
}

/* Values of rows start .. stop, weighted by p[m * stride + j] and added to sums [group, dim]. Returns the first row that is
 * left. */
long tenure_sums(const uint16_t *values, const float *p, float *sums, long stride, long start, long stop, long group,
                 long dim) {
    if (dim % 64) return start;
    for (long c = 0; c < dim; c += 64)
        for (long m = 0, heads; m < group; m += heads) {
            heads = group - m <= 7 ? group - m : 4;
            const float *weights = p + m * stride;
            float *to = sums + m * dim + c;
            switch (heads) {
            case 7: weighted(7, values + c, weights, to, stride, start, stop, dim); break;
            case 6: weighted(6, values + c, weights, to, stride, start, stop, dim); break;
            case 5: weighted(5, values + c, weights, to, stride, start, stop, dim); break;
            case 4: weighted(4, values + c, weights, to, stride, start, stop, dim); break;
            case 3: weighted(3, values + c, weights, to, stride, start, stop, dim); break;
            case 2: weighted(2, values + c, weights, to, stride, start, stop, dim); break;
            default: weighted(1, values + c, weights, to, stride, start, stop, dim);
            }
        }
    return stop;
}

#define ROWS 4  /* of weights, side by side */
#define LIVE 6  /* tokens: 24 sums in registers */
#define AHEAD 4 /* blocks of rows that are fetched, into the second cache, before they are needed */
#define LINE 32 /* bf16 in a cache line, a vector of them */

/* ROWS rows of weights times `live` tokens: sums[t * ROWS + r]. `ahead` rows further the weights are fetched meanwhile, half of
 * them each behind the first and the middle row, line by line: rows side by side are no stream that the hardware sees. */
static inline __attribute__((always_inline)) void rows_by(const int live, const uint16_t *const *w, const uint16_t *x,
                                                          long width, long ahead, float *sums) {
    const uint16_t *near = w[0] + ahead * width, *far = w[ROWS / 2] + ahead * width;
    __m512 sum[32];
    for (int i = 0; i < ROWS * live; i++) sum[i] = _mm512_setzero_ps();
    long i = 0;
    for (; i + LINE <= width; i += LINE) {
        __m512bh row[ROWS];
        for (int r = 0; r < ROWS; r++) row[r] = (__m512bh)_mm512_loadu_si512(w[r] + i);
        if (ahead)
            for (int r = 0; r < ROWS / 2; r++) {
                _mm_prefetch((const char *)(near + ROWS / 2 * i + LINE * r), _MM_HINT_T1);
                _mm_prefetch((const char *)(far + ROWS / 2 * i + LINE * r), _MM_HINT_T1);
            }
        for (int t = 0; t < live; t++) {
            __m512bh token = (__m512bh)_mm512_loadu_si512(x + t * width + i);
            for (int r = 0; r < ROWS; r++) sum[t * ROWS + r] = _mm512_dpbf16_ps(sum[t * ROWS + r], row[r], token);
        }
    }
    if (i < width) {
        __mmask32 mask = (1u << (width - i)) - 1;
        __m512bh row[ROWS];
        for (int r = 0; r < ROWS; r++) row[r] = (__m512bh)_mm512_maskz_loadu_epi16(mask, w[r] + i);
        for (int t = 0; t < live; t++) {
            __m512bh token = (__m512bh)_mm512_maskz_loadu_epi16(mask, x + t * width + i);
            for (int r = 0; r < ROWS; r++) sum[t * ROWS + r] = _mm512_dpbf16_ps(sum[t * ROWS + r], row[r], token);
        }
    }
    for (int i = ROWS * live; i < 32; i++) sum[i] = _mm512_setzero_ps();
    _mm512_storeu_ps(sums, sums_of(sum));
    if (ROWS * live > 16) _mm512_storeu_ps(sums + 16, sums_of(sum + 16));
}

static void rows_by_few(long live, const uint16_t *const *w, const uint16_t *x, long width, long ahead, float *sums) {
    switch (live) {
    case 6: rows_by(6, w, x, width, ahead, sums); break;
    case 5: rows_by(5, w, x, width, ahead, sums); break;
    case 4: rows_by(4, w, x, width, ahead, sums); break;
    case 3: rows_by(3, w, x, width, ahead, sums); break;
    case 2: rows_by(2, w, x, width, ahead, sums); break;
    default: rows_by(1, w, x, width, ahead, sums);
    }
}

/* y[t, o] (+)= W[o] x[t] + bias[o] on bf16 products, for some tens of tokens. x, W: bf16, y: fp32.
 * gated as in native.c: the first half of the rows are a gate, y is half as wide. */
void tenure_linear_rows(const uint16_t *w, const float *bias, const uint16_t *x, float *y, long tokens, long outputs,
                        long width, int add, int gated) {
    long half = gated ? outputs / 2 : outputs, made = gated ? ROWS / 2 : ROWS, groups = (tokens + LIVE - 1) / LIVE;
    const __m512i turned = _mm512_set_epi32(13, 12, 15, 14, 9, 8, 11, 10, 5, 4, 7, 6, 1, 0, 3, 2);
#pragma omp parallel for schedule(static)
    for (long block = 0; block < (half + made - 1) / made; block++) {
        long first = block * made, count = half - first < made ? half - first : made;
        const uint16_t *rows[ROWS];
        float own[ROWS];
        for (long r = 0; r < ROWS; r++) {
            long o = r % made < count ? first + r % made : first;
            o += r < made ? 0 : half;
            rows[r] = w + o * width;
            own[r] = bias ? bias[o] : 0.0f;
        }
        __m512 offset = _mm512_broadcast_f32x4(_mm_loadu_ps(own));
        for (long g = 0, t = 0; g < groups; g++) {
            long live = (tokens - t + groups - g - 1) / (groups - g);
            float sums[32];
            rows_by_few(live, rows, x + t * width, width, g || first + (AHEAD + 1) * made > half ? 0 : AHEAD * made, sums);
            for (long k = 0; k < ROWS * live; k += 16) {
                __m512 v = _mm512_add_ps(_mm512_loadu_ps(sums + k), offset);
                if (gated) { /* two gates, then two ups of each token */
                    v = _mm512_mul_ps(silu_of(v), _mm512_permutexvar_ps(turned, v));
                }
                _mm512_storeu_ps(sums + k, v);
            }
            for (long k = 0; k < live; k++, t++) {
                float *to = y + t * half + first, *from = sums + ROWS * k;
                if (count == ROWS)
                    _mm_storeu_ps(to, add ? _mm_add_ps(_mm_loadu_ps(to), _mm_loadu_ps(from)) : _mm_loadu_ps(from));
                else
                    for (long r = 0; r < count; r++) to[r] = add ? to[r] + from[r] : from[r];
            }
        }
    }
}

/* fp32 to bf16, rounded to nearest even. */
void tenure_round(const float *x, uint16_t *y, long count) {
    for (long i = 0; i < count; i += 16) {
        __mmask16 live = count - i >= 16 ? 0xffff : (__mmask16)((1u << (count - i)) - 1);
        _mm256_mask_storeu_epi16(y + i, live, to_bf16(_mm512_maskz_loadu_ps(live, x + i)));
    }
}
#else
int tenure_can_attend(void) { return 0; }
#endif

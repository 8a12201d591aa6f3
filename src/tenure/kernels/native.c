/* Decoding on the CPU: a few tokens at a time, bound by how fast weights and keys are read.
 *
 * linear: y = epilogue(W prologue(x) + b) for up to MAX_TOKENS tokens, W read once.
 * attention: one new token of each session in one layer: append, rotate, attend, attention mass.
 *
 * Activations are fp32. Weights are bf16, fp32 or int8 with one scale a row; keys and values bf16 or fp32. Plain loops:
 * the compiler vectorises them for the machine it runs on.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "bf16.h"
#include "isa.h"

typedef float f32;
typedef int8_t i8;

#define LANES 64 /* sums in flight along a row */

static inline float load_f32(f32 v) { return v; }
static inline float load_i8(i8 v) { return (float)v; }

static inline f32 store_f32(float f) { return f; }

/* e^x for x <= 0. Below, results would be denormal or leave the vectorised exponential, which takes either one by one. */
static inline float power(float x) { return expf(x < -70.0f ? -70.0f : x); }

/* Root-mean-square norm of each token, weight fp32 [width]. */
void tenure_rms_norm(const float *x, const float *weight, float *y, long tokens, long width, float eps) {
    for (long t = 0; t < tokens; t++) {
        const float *in = x + t * width;
        float sum = 0.0f;
        for (long i = 0; i < width; i++) sum += in[i] * in[i];
        float scale = 1.0f / sqrtf(sum / (float)width + eps);
        for (long i = 0; i < width; i++) y[t * width + i] = in[i] * scale * weight[i];
    }
}

/* Rows are read one after another, so that memory is one long stream that the hardware can prefetch. */
#define DOT(T)                                                                                                \
    static inline float dot_##T(const T *restrict w, const float *restrict x, long width) {                   \
        float lanes[LANES] = {0.0f}, sum = 0.0f;                                                              \
        long i = 0;                                                                                           \
        for (; i + LANES <= width; i += LANES)                                                                \
            for (long l = 0; l < LANES; l++) lanes[l] += load_##T(w[i + l]) * x[i + l];                       \
        for (; i < width; i++) sum += load_##T(w[i]) * x[i];                                                  \
        for (long l = 0; l < LANES; l++) sum += lanes[l];                                                     \
        return sum;                                                                                           \
    }

/* The same for four tokens: a weight is read and widened once for all of them. */
#define DOT4(T)                                                                                               \
    static inline void dot4_##T(const T *restrict w, const float *restrict x, long width,                     \
                                float *restrict sums) {                                                       \
        const float *x1 = x + width, *x2 = x1 + width, *x3 = x2 + width;                                      \
        float a[LANES] = {0.0f}, b[LANES] = {0.0f}, c[LANES] = {0.0f}, d[LANES] = {0.0f};                     \
        float e = 0.0f, f = 0.0f, g = 0.0f, h = 0.0f;                                                         \
        long i = 0;                                                                                           \
        for (; i + LANES <= width; i += LANES)                                                                \
            for (long l = 0; l < LANES; l++) {                                                                \
                float v = load_##T(w[i + l]);                                                                 \
                a[l] += v * x[i + l], b[l] += v * x1[i + l];                                                  \
                c[l] += v * x2[i + l], d[l] += v * x3[i + l];                                                 \
            }                                                                                                 \
        for (; i < width; i++) {                                                                              \
            float v = load_##T(w[i]);                                                                         \
            e += v * x[i], f += v * x1[i], g += v * x2[i], h += v * x3[i];                                    \
        }                                                                                                     \
        for (long l = 0; l < LANES; l++) e += a[l], f += b[l], g += c[l], h += d[l];                          \
        sums[0] = e, sums[1] = f, sums[2] = g, sums[3] = h;                                                   \
    }

/* y[t, o] (+)= scale[o] * W[o] x[t] + bias[o].
 * gated: W holds the gate's rows, then as many of `up`; y = silu(gate) * up, of half the rows. */
#define LINEAR(T)                                                                                             \
    void tenure_linear_##T(const T *w, const float *scale, const float *bias, const float *x, float *y,       \
                           long tokens, long outputs, long width, int add, int gated) {                       \
        long half = gated ? outputs / 2 : outputs;                                                            \
        _Pragma("omp parallel for schedule(static)") for (long o = 0; o < half; o++) {                        \
            float s[4], p[4];                                                                                 \
            for (long t = 0, n; t < tokens; t += n) {                                                         \
                n = tokens - t >= 4 ? 4 : 1;                                                                  \
                if (n == 4) dot4_##T(w + o * width, x + t * width, width, s);                                 \
                else s[0] = dot_##T(w + o * width, x + t * width, width);                                     \
                if (gated && n == 4) dot4_##T(w + (half + o) * width, x + t * width, width, p);               \
                else if (gated) p[0] = dot_##T(w + (half + o) * width, x + t * width, width);                 \
                for (long k = 0; k < n; k++) {                                                                \
                    float v = s[k] * (scale ? scale[o] : 1.0f) + (bias ? bias[o] : 0.0f);                     \
                    if (gated) {                                                                              \
                        float u = p[k] * (scale ? scale[half + o] : 1.0f) + (bias ? bias[half + o] : 0.0f);   \
                        v = silu(v) * u;                                                                      \
                    }                                                                                         \
                    float *out = y + (t + k) * half + o;                                                      \
                    *out = add ? *out + v : v;                                                                \
                }                                                                                             \
            }                                                                                                 \
        }                                                                                                     \
    }

DOT(bf16)
DOT(f32)
DOT4(bf16)
DOT4(f32)
LINEAR(bf16)
LINEAR(f32)
#ifndef TENURE_VNNI /* else in int8.c */
DOT(i8)
DOT4(i8)
LINEAR(i8)
#endif

static void rotate(const float *x, const float *cosines, const float *sines, float *y, long half, long dim) {
    for (long i = 0; i < half; i++) {
        y[i] = x[i] * cosines[i] - x[half + i] * sines[i];
        y[half + i] = x[half + i] * cosines[i] + x[i] * sines[i];
    }
    for (long i = 2 * half; i < dim; i++) y[i] = x[i];
}

#define BLOCK 256 /* rows a task */

/* What a second set of keys is of both, by their log-sum-exps. -1e30 stands for no keys. */
static inline float joined(float own, float other) {
    float gap = own - other;
    gap = gap > 80.0f ? 80.0f : gap < -80.0f ? -80.0f : gap;
    return 1.0f / (1.0f + expf(gap));
}

#ifdef TENURE_BF16 /* in flash.c: most of the rows; they return the first that is left */
long tenure_logits(const bf16 *keys, const float *query, float *to, long stride, long start, long stop, long group,
                   long dim);
long tenure_sums(const bf16 *values, const float *p, float *sums, long stride, long start, long stop, long group,
                 long dim);
#define MOST_bf16(what, ...) start = tenure_##what(__VA_ARGS__)
#else
#define MOST_bf16(what, ...)
#endif
#define MOST_f32(what, ...)

/* Logits of a kv head's queries on rows start .. stop: to[m * stride + j]. */
#define LOGITS(T)                                                                                             \
    static inline void logits_##T(const T *restrict keys, const float *restrict query, float *restrict to,    \
                                  long stride, long start, long stop, long group, long dim) {                 \
        float wide[dim];                                                                                      \
        MOST_##T(logits, keys, query, to, stride, start, stop, group, dim);                                   \
        for (long j = start; j < stop; j++) {                                                                 \
            for (long i = 0; i < dim; i++) wide[i] = load_##T(keys[j * dim + i]);                             \
            for (long m = 0; m < group; m++) {                                                                \
                const float *restrict q = query + m * dim;                                                    \
                float sum = 0.0f;                                                                             \
                for (long i = 0; i < dim; i++) sum += q[i] * wide[i];                                         \
                to[m * stride + j] = sum;                                                                     \
            }                                                                                                 \
        }                                                                                                     \
    }

/* Values of rows start .. stop, weighted by p[m * stride + j] and added to sums[m]; these are read and written once for
 * four rows. */
#define SUMS(T)                                                                                               \
    static inline void sums_##T(const T *restrict values, const float *restrict p, float *restrict sums,      \
                                long stride, long start, long stop, long group, long dim) {                   \
        float wide[4 * dim];                                                                                  \
        MOST_##T(sums, values, p, sums, stride, start, stop, group, dim);                                     \
        long j = start;                                                                                       \
        for (; j + 4 <= stop; j += 4) {                                                                       \
            for (long i = 0; i < 4 * dim; i++) wide[i] = load_##T(values[j * dim + i]);                       \
            for (long m = 0; m < group; m++) {                                                                \
                const float *w = p + m * stride + j;                                                          \
                float w0 = w[0], w1 = w[1], w2 = w[2], w3 = w[3], *restrict to = sums + m * dim;              \
                for (long i = 0; i < dim; i++)                                                                \
                    to[i] += w0 * wide[i] + w1 * wide[dim + i] + w2 * wide[2 * dim + i] + w3 * wide[3 * dim + i];\
            }                                                                                                 \
        }                                                                                                     \
        for (; j < stop; j++)                                                                                 \
            for (long m = 0; m < group; m++) {                                                                \
                float w = p[m * stride + j], *restrict to = sums + m * dim;                                   \
                for (long i = 0; i < dim; i++) to[i] += w * load_##T(values[j * dim + i]);                    \
            }                                                                                                 \
    }

LOGITS(bf16)
LOGITS(f32)
SUMS(bf16)
SUMS(f32)

/* One token of each of `count` sessions: what the session brings, tensors of layer 0 first. */
typedef struct {
    const float *cosines, *sines; /* [half] */
    void *raw, *values, *rotated; /* [layers, kv_heads, capacity, dim] */
    float *mass;                  /* [groups, row + 1] or NULL; gets share * (mean ? mean : max) over heads added */
    const float *other, *other_lse; /* [heads, dim], [heads]: attention over further keys to join with, or NULL */
    long capacity, row, mass_layer; /* mass_layer: from the mass of a layer to that of the next, 0 where they share it */
    float share;
    int mean;
} Step;

/* One layer. qkv: fp32 [count, heads + 2 kv_heads, dim], unrotated. out: [count, heads, dim].
 *
 * The rows of a session are cut into `parts` of at most `width` rows, each with a softmax of its own, and joined by their
 * log-sum-exps. A thread keeps its part: what one core writes and another reads is slow where they share no cache.
 * scratch: count * parts * heads * (width + dim + 2). */
#define ATTENTION(T)                                                                                          \
    void tenure_attention_##T(const Step *steps, long count, long layer, const float *qkv, float *out,        \
                              float *scratch, long parts, long width, long heads, long kv_heads, long dim,    \
                              long half, float scale) {                                                       \
        long group = heads / kv_heads, all = count * parts * heads;                                           \
        float *probabilities = scratch, *partial = scratch + all * width, *tops = partial + all * dim;        \
        float *totals = tops + all;                                                                           \
        _Pragma("omp parallel") {                                                                             \
            _Pragma("omp for schedule(static)") for (long task = 0; task < count * parts * kv_heads; task++) {\
                long n = task / kv_heads / parts, part = task / kv_heads % parts, g = task % kv_heads;        \
                const Step *step = steps + n;                                                                 \
                long rows = step->row + 1, each = (rows + parts - 1) / parts, start = part * each;            \
                long stop = start + each < rows ? start + each : rows;                                        \
                const float *token = qkv + n * (heads + 2 * kv_heads) * dim, *k = token + (heads + g) * dim;  \
                long slab = (layer * kv_heads + g) * step->capacity * dim;                                    \
                long first = (n * parts + part) * heads + g * group;                                          \
                T *keys = (T *)step->rotated + slab, *values = (T *)step->values + slab;                      \
                float query[group * dim], *sums = partial + first * dim;                                      \
                if (start <= step->row && step->row < stop) {                                                 \
                    T *to = (T *)step->raw + slab + step->row * dim;                                          \
                    T *tv = values + step->row * dim, *tr = keys + step->row * dim;                           \
                    for (long i = 0; i < dim; i++) to[i] = store_##T(k[i]);                                   \
                    for (long i = 0; i < dim; i++) tv[i] = store_##T(k[kv_heads * dim + i]);                  \
                    rotate(k, step->cosines, step->sines, query, half, dim);                                  \
                    for (long i = 0; i < dim; i++) tr[i] = store_##T(query[i]);                               \
                }                                                                                             \
                for (long m = 0; m < group; m++)                                                              \
                    rotate(token + (g * group + m) * dim, step->cosines, step->sines, query + m * dim, half, dim);\
                for (long i = 0; i < group * dim; i++) query[i] *= scale;                                     \
                memset(sums, 0, sizeof(float) * (size_t)(group * dim));                                       \
                for (long m = 0; m < group; m++) tops[first + m] = -1e30f, totals[first + m] = 0.0f;          \
                if (start >= stop) continue;                                                                  \
                float *weights = probabilities + first * width;                                               \
                logits_##T(keys + start * dim, query, weights, width, 0, stop - start, group, dim);           \
                for (long m = 0; m < group; m++) {                                                            \
                    float *restrict p = weights + m * width, top = p[0], total = 0.0f;                        \
                    for (long j = 1; j < stop - start; j++) top = p[j] > top ? p[j] : top;                    \
                    for (long j = 0; j < stop - start; j++) p[j] = power(p[j] - top), total += p[j];          \
                    tops[first + m] = top, totals[first + m] = total;                                         \
                }                                                                                             \
                sums_##T(values + start * dim, weights, sums, width, 0, stop - start, group, dim);            \
            }                                                                                                 \
            _Pragma("omp for schedule(static)") for (long task = 0; task < count * parts; task++) {           \
                long n = task / parts, part = task % parts;                                                   \
                const Step *step = steps + n;                                                                 \
                long rows = step->row + 1, each = (rows + parts - 1) / parts, start = part * each;            \
                long stop = start + each < rows ? start + each : rows;                                        \
                float mean = step->share / (float)heads;                                                      \
                float *restrict seen = probabilities + task * heads * width; /* of the first head, then of all */\
                for (long h = 0; h < heads; h++) {                                                            \
                    float top = -1e30f, total = 0.0f, rest = 0.0f, by[parts];                                 \
                    for (long q = 0; q < parts; q++) {                                                        \
                        float other = tops[(n * parts + q) * heads + h];                                      \
                        top = other > top ? other : top;                                                      \
                    }                                                                                         \
                    for (long q = 0; q < parts; q++) {                                                        \
                        long at = (n * parts + q) * heads + h;                                                \
                        by[q] = power(tops[at] - top);                                                        \
                        total += by[q] * totals[at];                                                          \
                    }                                                                                         \
                    if (step->other) rest = joined(top + logf(total), step->other_lse[h]);                    \
                    for (long q = 0; q < parts; q++) by[q] *= (1.0f - rest) / total;                          \
                    if (h % parts == part) {                                                                  \
                        float *restrict to = out + (n * heads + h) * dim;                                     \
                        for (long i = 0; i < dim; i++) to[i] = rest ? rest * step->other[h * dim + i] : 0.0f; \
                        for (long q = 0; q < parts; q++) {                                                    \
                            const float *from = partial + ((n * parts + q) * heads + h) * dim;                \
                            for (long i = 0; i < dim; i++) to[i] += by[q] * from[i];                          \
                        }                                                                                     \
                    }                                                                                         \
                    const float *restrict p = probabilities + (task * heads + h) * width;                     \
                    float own = by[part] * (step->mean ? mean : step->share);                                 \
                    if (!step->mass) continue;                                                                \
                    if (!h)                                                                                   \
                        for (long j = 0; j < stop - start; j++) seen[j] *= own;                               \
                    else if (step->mean)                                                                      \
                        for (long j = 0; j < stop - start; j++) seen[j] += own * p[j];                        \
                    else                                                                                      \
                        for (long j = 0; j < stop - start; j++) seen[j] = own * p[j] > seen[j] ? own * p[j] : seen[j];\
                }                                                                                             \
                if (step->mass) {                                                                             \
                    float *restrict mass = step->mass + layer * step->mass_layer + start;                     \
                    for (long j = 0; j < stop - start; j++) mass[j] += seen[j];                               \
                }                                                                                             \
            }                                                                                                 \
        }                                                                                                     \
    }

ATTENTION(bf16)
ATTENTION(f32)

/* One session's token over frozen entries of a layer, an own number for each kv head.
 * keys, values: [entries, dim], rotated. bias: [entries], log-multiplicities. offsets: [kv_heads + 1] into them.
 * out, lse: [heads, dim], [heads], joined with other and other_lse as above. logits: scratch [heads, longest]. */
#define RAGGED(T)                                                                                             \
    void tenure_ragged_##T(const float *qkv, const float *cosines, const float *sines, const T *keys,         \
                           const T *values, const float *bias, const long *offsets, float *out, float *lse,   \
                           float *logits, long heads, long kv_heads, long dim, long half, long longest,       \
                           float scale, const float *other, const float *other_lse) {                         \
        long group = heads / kv_heads, blocks = (longest + BLOCK - 1) / BLOCK;                                \
        float *query = malloc(sizeof(float) * (size_t)heads * (size_t)dim);                                   \
        float *partial = calloc((size_t)(heads * blocks) * (size_t)dim, sizeof(float));                       \
        float *rest = malloc(sizeof(float) * (size_t)heads);                                                  \
        for (long h = 0; h < heads; h++) {                                                                    \
            rotate(qkv + h * dim, cosines, sines, query + h * dim, half, dim);                                \
            for (long i = 0; i < dim; i++) query[h * dim + i] *= scale;                                       \
        }                                                                                                     \
        _Pragma("omp parallel") {                                                                             \
            _Pragma("omp for schedule(static)") for (long task = 0; task < kv_heads * blocks; task++) {       \
                long g = task / blocks, first = offsets[g], rows = offsets[g + 1] - first;                    \
                long start = task % blocks * BLOCK, stop = start + BLOCK < rows ? start + BLOCK : rows;       \
                float *to = logits + g * group * longest;                                                     \
                logits_##T(keys + first * dim, query + g * group * dim, to, longest, start, stop, group, dim);\
                for (long m = 0; m < group; m++)                                                              \
                    for (long j = start; j < stop; j++) to[m * longest + j] += bias[first + j];               \
            }                                                                                                 \
            _Pragma("omp for schedule(static)") for (long h = 0; h < heads; h++) {                            \
                long rows = offsets[h / group + 1] - offsets[h / group];                                      \
                float *restrict p = logits + h * longest;                                                     \
                float top = rows ? p[0] : 0.0f, sum = 0.0f, own = -1e30f;                                     \
                for (long j = 1; j < rows; j++) top = p[j] > top ? p[j] : top;                                \
                for (long j = 0; j < rows; j++) p[j] = power(p[j] - top), sum += p[j];                        \
                if (rows) own = top + logf(sum);                                                              \
                rest[h] = other ? (rows ? joined(own, other_lse[h]) : 1.0f) : 0.0f;                           \
                float inverse = rows ? (1.0f - rest[h]) / sum : 0.0f;                                         \
                for (long j = 0; j < rows; j++) p[j] *= inverse;                                              \
                lse[h] = other && other_lse[h] > own ? other_lse[h] - logf(rest[h]) :                         \
                         rows ? own - logf(1.0f - rest[h]) : own;                                             \
            }                                                                                                 \
            _Pragma("omp for schedule(static)") for (long task = 0; task < kv_heads * blocks; task++) {       \
                long g = task / blocks, block = task % blocks, first = offsets[g];                            \
                long rows = offsets[g + 1] - first, start = block * BLOCK;                                    \
                long stop = start + BLOCK < rows ? start + BLOCK : rows;                                      \
                float *restrict sums = partial + (size_t)(block * heads + g * group) * (size_t)dim;           \
                sums_##T(values + first * dim, logits + g * group * longest, sums, longest, start, stop, group, dim);\
            }                                                                                                 \
        }                                                                                                     \
        for (long i = 0; i < heads * dim; i++) {                                                              \
            float sum = other ? rest[i / dim] * other[i] : 0.0f;                                              \
            for (long block = 0; block < blocks; block++) sum += partial[block * heads * dim + i];            \
            out[i] = sum;                                                                                     \
        }                                                                                                     \
        free(query);                                                                                          \
        free(partial);                                                                                        \
        free(rest);                                                                                           \
    }

RAGGED(bf16)
RAGGED(f32)

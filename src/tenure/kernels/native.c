/* Decoding on the CPU: a few tokens at a time, bound by how fast weights and keys are read.
 *
 * linear: y = epilogue(W prologue(x) + b) for up to MAX_TOKENS tokens, W read once.
 * attention: one new token of one layer: append, rotate, attend, attention mass.
 *
 * Activations are fp32. Weights are bf16, fp32 or int8 with one scale a row; keys and values bf16 or fp32. Plain loops:
 * the compiler vectorises them for the machine it runs on.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;
typedef float f32;
typedef int8_t i8;

#define LANES 64 /* sums in flight along a row */

static inline float load_bf16(bf16 v) {
    uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline float load_f32(f32 v) { return v; }
static inline float load_i8(i8 v) { return (float)v; }

static inline bf16 store_bf16(float f) { /* round to nearest even */
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
static inline f32 store_f32(float f) { return f; }

static inline float silu(float v) { return v / (1.0f + expf(-v)); }

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
#define DOT(T)                                                                                    \
    static inline float dot_##T(const T *restrict w, const float *restrict x, long width) {       \
        float lanes[LANES] = {0.0f}, sum = 0.0f;                                                  \
        long i = 0;                                                                               \
        for (; i + LANES <= width; i += LANES)                                                    \
            for (long l = 0; l < LANES; l++) lanes[l] += load_##T(w[i + l]) * x[i + l];           \
        for (; i < width; i++) sum += load_##T(w[i]) * x[i];                                      \
        for (long l = 0; l < LANES; l++) sum += lanes[l];                                         \
        return sum;                                                                               \
    }

/* The same for four tokens: a weight is read and widened once for all of them. */
#define DOT4(T)                                                                                   \
    static inline void dot4_##T(const T *restrict w, const float *restrict x, long width,         \
                                float *restrict sums) {                                           \
        const float *x1 = x + width, *x2 = x1 + width, *x3 = x2 + width;                          \
        float a[LANES] = {0.0f}, b[LANES] = {0.0f}, c[LANES] = {0.0f}, d[LANES] = {0.0f};         \
        float e = 0.0f, f = 0.0f, g = 0.0f, h = 0.0f;                                             \
        long i = 0;                                                                               \
        for (; i + LANES <= width; i += LANES)                                                    \
            for (long l = 0; l < LANES; l++) {                                                    \
                float v = load_##T(w[i + l]);                                                     \
                a[l] += v * x[i + l], b[l] += v * x1[i + l];                                      \
                c[l] += v * x2[i + l], d[l] += v * x3[i + l];                                     \
            }                                                                                     \
        for (; i < width; i++) {                                                                  \
            float v = load_##T(w[i]);                                                             \
            e += v * x[i], f += v * x1[i], g += v * x2[i], h += v * x3[i];                        \
        }                                                                                         \
        for (long l = 0; l < LANES; l++) e += a[l], f += b[l], g += c[l], h += d[l];              \
        sums[0] = e, sums[1] = f, sums[2] = g, sums[3] = h;                                       \
    }

/* y[t, o] (+)= scale[o] * W[o] x[t] + bias[o].
 * gated: W holds the gate's rows, then as many of `up`; y = silu(gate) * up, of half the rows. */
#define LINEAR(T)                                                                                         \
    void tenure_linear_##T(const T *w, const float *scale, const float *bias, const float *x, float *y,   \
                           long tokens, long outputs, long width, int add, int gated) {                   \
        long half = gated ? outputs / 2 : outputs;                                                        \
        _Pragma("omp parallel for schedule(static)") for (long o = 0; o < half; o++) {                    \
            float s[4], p[4];                                                                             \
            for (long t = 0, n; t < tokens; t += n) {                                                     \
                n = tokens - t >= 4 ? 4 : 1;                                                              \
                if (n == 4) dot4_##T(w + o * width, x + t * width, width, s);                             \
                else s[0] = dot_##T(w + o * width, x + t * width, width);                                 \
                if (gated && n == 4) dot4_##T(w + (half + o) * width, x + t * width, width, p);           \
                else if (gated) p[0] = dot_##T(w + (half + o) * width, x + t * width, width);             \
                for (long k = 0; k < n; k++) {                                                            \
                    float v = s[k] * (scale ? scale[o] : 1.0f) + (bias ? bias[o] : 0.0f);                 \
                    if (gated) {                                                                          \
                        float u = p[k] * (scale ? scale[half + o] : 1.0f) + (bias ? bias[half + o] : 0.0f); \
                        v = silu(v) * u;                                                                  \
                    }                                                                                     \
                    float *out = y + (t + k) * half + o;                                                  \
                    *out = add ? *out + v : v;                                                            \
                }                                                                                         \
            }                                                                                             \
        }                                                                                                 \
    }

DOT(bf16)
DOT(f32)
DOT(i8)
DOT4(bf16)
DOT4(f32)
DOT4(i8)
LINEAR(bf16)
LINEAR(f32)
LINEAR(i8)

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

/* Logits of a kv head's queries on rows start .. stop: to[m * stride + j]. */
#define LOGITS(T)                                                                                             \
    static inline void logits_##T(const T *restrict keys, const float *restrict query, float *restrict to,    \
                                  long stride, long start, long stop, long group, long dim) {                 \
        float wide[dim];                                                                                      \
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

/* One token of one layer.
 * qkv: fp32 [heads + 2 kv_heads, dim], unrotated. raw, values, rotated: [kv_heads, capacity, dim] of the layer.
 * out: [heads, dim]. probabilities: scratch [heads, row + 1], holds the softmax after the call.
 * mass: [row + 1] or NULL; gets share * (reduce ? mean : max) over heads added.
 * other, other_lse: [heads, dim] and [heads], attention over further keys to be joined with, or NULL; may be out. */
#define ATTENTION(T)                                                                                          \
    void tenure_attention_##T(const float *qkv, const float *cosines, const float *sines, T *raw, T *values,  \
                              T *rotated, float *out, float *probabilities, float *mass, long heads,          \
                              long kv_heads, long dim, long half, long capacity, long row, float scale,       \
                              float share, int mean, const float *other, const float *other_lse) {            \
        long group = heads / kv_heads, rows = row + 1, blocks = (rows + BLOCK - 1) / BLOCK;                   \
        float *query = malloc(sizeof(float) * (size_t)(heads + 1) * (size_t)dim);                             \
        float *partial = malloc(sizeof(float) * (size_t)(heads * blocks) * (size_t)dim);                      \
        float *turned = query + heads * dim, *rest = malloc(sizeof(float) * (size_t)heads);                   \
        for (long g = 0; g < kv_heads; g++) {                                                                 \
            const float *k = qkv + (heads + g) * dim, *v = qkv + (heads + kv_heads + g) * dim;                \
            T *to = raw + (g * capacity + row) * dim, *tv = values + (g * capacity + row) * dim;              \
            T *tr = rotated + (g * capacity + row) * dim;                                                     \
            for (long i = 0; i < dim; i++) to[i] = store_##T(k[i]), tv[i] = store_##T(v[i]);                  \
            rotate(k, cosines, sines, turned, half, dim);                                                     \
            for (long i = 0; i < dim; i++) tr[i] = store_##T(turned[i]);                                      \
        }                                                                                                     \
        for (long h = 0; h < heads; h++) {                                                                    \
            rotate(qkv + h * dim, cosines, sines, query + h * dim, half, dim);                                \
            for (long i = 0; i < dim; i++) query[h * dim + i] *= scale;                                       \
        }                                                                                                     \
        _Pragma("omp parallel") {                                                                             \
            _Pragma("omp for schedule(static)") for (long task = 0; task < kv_heads * blocks; task++) {       \
                long g = task / blocks, start = task % blocks * BLOCK;                                        \
                long stop = start + BLOCK < rows ? start + BLOCK : rows;                                      \
                logits_##T(rotated + g * capacity * dim, query + g * group * dim, probabilities + g * group * rows,\
                           rows, start, stop, group, dim);                                                    \
            }                                                                                                 \
            _Pragma("omp for schedule(static)") for (long h = 0; h < heads; h++) {                            \
                float *restrict p = probabilities + h * rows;                                                 \
                float top = p[0], sum = 0.0f;                                                                 \
                for (long j = 1; j < rows; j++) top = p[j] > top ? p[j] : top;                                \
                for (long j = 0; j < rows; j++) p[j] = expf(p[j] - top), sum += p[j];                         \
                float inverse = 1.0f / sum;                                                                   \
                rest[h] = other ? joined(top + logf(sum), other_lse[h]) : 0.0f;                               \
                inverse *= 1.0f - rest[h];                                                                    \
                for (long j = 0; j < rows; j++) p[j] *= inverse;                                              \
            }                                                                                                 \
            _Pragma("omp for schedule(static)") for (long task = 0; task < kv_heads * blocks; task++) {       \
                long g = task / blocks, block = task % blocks, start = block * BLOCK;                         \
                long stop = start + BLOCK < rows ? start + BLOCK : rows;                                      \
                float *restrict sums = partial + (size_t)(block * heads + g * group) * (size_t)dim;           \
                memset(sums, 0, sizeof(float) * (size_t)(group * dim));                                       \
                sums_##T(values + g * capacity * dim, probabilities + g * group * rows, sums, rows, start, stop,\
                         group, dim);                                                                         \
                if (mass && g == block % kv_heads) {                                                          \
                    float part = mean ? share / (float)heads : share, seen[BLOCK] = {0.0f};                   \
                    for (long h = 0; h < heads; h++) {                                                        \
                        const float *restrict p = probabilities + h * rows + start;                           \
                        if (mean)                                                                             \
                            for (long i = 0; i < stop - start; i++) seen[i] += p[i];                          \
                        else                                                                                  \
                            for (long i = 0; i < stop - start; i++) seen[i] = p[i] > seen[i] ? p[i] : seen[i];\
                    }                                                                                         \
                    for (long i = 0; i < stop - start; i++) mass[start + i] += seen[i] * part;                \
                }                                                                                             \
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

ATTENTION(bf16)
ATTENTION(f32)

/* One token's attention over frozen entries of a layer, an own number for each kv head.
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
                for (long j = 0; j < rows; j++) p[j] = expf(p[j] - top), sum += p[j];                         \
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

/* What lies between the products of a chunk, in bf16, one read and one write each; sums are fp32.
 *
 * torch takes several passes over memory for each. Plain loops: the compiler vectorises them for the machine it runs on.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

static inline float load(bf16 v) {
    uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline bf16 store(float f) { /* round to nearest even */
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* x += add where that is given, then y = x / rms(x) * weight, a row at a time. weight: fp32 [width]. */
void tenure_norm_rows(bf16 *restrict x, const bf16 *restrict add, const float *restrict weight, bf16 *restrict y, long rows,
                      long width, float eps) {
#pragma omp parallel for schedule(static)
    for (long t = 0; t < rows; t++) {
        bf16 *restrict in = x + t * width, *restrict out = y + t * width;
        const bf16 *restrict more = add + t * width;
        float sum = 0.0f;
        if (add)
            for (long i = 0; i < width; i++) in[i] = store(load(in[i]) + load(more[i]));
        for (long i = 0; i < width; i++) sum += load(in[i]) * load(in[i]);
        float scale = 1.0f / sqrtf(sum / (float)width + eps);
        for (long i = 0; i < width; i++) out[i] = store(load(in[i]) * scale * weight[i]);
    }
}

/* y = silu(x[:half]) * x[half:], a row at a time. Below -80 silu is 0 in bf16, and e^-v would leave fp32. */
void tenure_gate_rows(const bf16 *restrict x, bf16 *restrict y, long rows, long half) {
#pragma omp parallel for schedule(static)
    for (long t = 0; t < rows; t++) {
        const bf16 *restrict gate = x + 2 * t * half, *restrict up = gate + half;
        bf16 *restrict out = y + t * half;
        for (long i = 0; i < half; i++) {
            float v = load(gate[i]);
            out[i] = store(v / (1.0f + expf(v < -80.0f ? 80.0f : -v)) * load(up[i]));
        }
    }
}

/* Rotation of [heads, rows, dim] with strides, split halves, by cosines and sines [rows, half]; y without gaps. */
void tenure_rotate_rows(const bf16 *restrict x, const float *restrict cosines, const float *restrict sines, bf16 *restrict y,
                        long heads, long rows, long dim, long half, long x_head, long x_row) {
#pragma omp parallel for collapse(2) schedule(static)
    for (long h = 0; h < heads; h++)
        for (long t = 0; t < rows; t++) {
            const bf16 *restrict in = x + h * x_head + t * x_row;
            const float *restrict c = cosines + t * half, *restrict s = sines + t * half;
            bf16 *restrict out = y + (h * rows + t) * dim;
            for (long i = 0; i < half; i++) {
                float a = load(in[i]), b = load(in[half + i]);
                out[i] = store(a * c[i] - b * s[i]);
                out[half + i] = store(b * c[i] + a * s[i]);
            }
            for (long i = 2 * half; i < dim; i++) out[i] = in[i];
        }
}

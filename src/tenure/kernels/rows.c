/* What lies between the products of a chunk, in bf16, one read and one write each; sums are fp32.
 *
 * torch takes several passes over memory for each. Plain loops: the compiler vectorises them for the machine it runs on.
 */
#include <math.h>

#include "bf16.h"

/* x += add where that is given, then y = x / rms(x) * weight, a row at a time. weight: fp32 [width]. */
void tenure_norm_rows(bf16 *restrict x, const bf16 *restrict add, const float *restrict weight, bf16 *restrict y, long rows,
                      long width, float eps) {
#pragma omp parallel for schedule(static)
    for (long t = 0; t < rows; t++) {
        bf16 *restrict in = x + t * width, *restrict out = y + t * width;
        const bf16 *restrict more = add + t * width;
        float sum = 0.0f;
        if (add)
            for (long i = 0; i < width; i++) in[i] = store_bf16(load_bf16(in[i]) + load_bf16(more[i]));
        for (long i = 0; i < width; i++) sum += load_bf16(in[i]) * load_bf16(in[i]);
        float scale = 1.0f / sqrtf(sum / (float)width + eps);
        for (long i = 0; i < width; i++) out[i] = store_bf16(load_bf16(in[i]) * scale * weight[i]);
    }
}

/* y = silu(x[:half]) * x[half:], a row at a time. */
void tenure_gate_rows(const bf16 *restrict x, bf16 *restrict y, long rows, long half) {
#pragma omp parallel for schedule(static)
    for (long t = 0; t < rows; t++) {
        const bf16 *restrict gate = x + 2 * t * half, *restrict up = gate + half;
        bf16 *restrict out = y + t * half;
        for (long i = 0; i < half; i++) out[i] = store_bf16(silu(load_bf16(gate[i])) * load_bf16(up[i]));
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
                float a = load_bf16(in[i]), b = load_bf16(in[half + i]);
                out[i] = store_bf16(a * c[i] - b * s[i]);
                out[half + i] = store_bf16(b * c[i] + a * s[i]);
            }
            for (long i = 2 * half; i < dim; i++) out[i] = in[i];
        }
}

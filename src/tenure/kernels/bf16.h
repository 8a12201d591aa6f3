/* bf16 numbers one by one, for loops that the compiler vectorises. */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

static inline float load_bf16(bf16 v) {
    uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline bf16 store_bf16(float f) { /* round to nearest even */
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* Below -80 it is 0 in fp32, and e^-v would leave fp32. */
static inline float silu(float v) { return v / (1.0f + expf(v < -80.0f ? 80.0f : -v)); }

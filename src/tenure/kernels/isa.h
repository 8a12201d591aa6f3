/* What the kernels on vectors of 512 bits ask of the processor: with a product goes all else that they use. */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#ifdef __AVX512VNNI__
#define TENURE_VNNI
#endif
#ifdef __AVX512BF16__
#define TENURE_BF16
#endif
#endif

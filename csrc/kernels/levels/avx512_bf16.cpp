// AVX-512 with products of bf16: Zen 4 and 5, Cooper Lake.

#include "../kernels.h"

#if defined(__x86_64__)

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
#define RAY_HETERO_LEVEL avx512_bf16
#define RAY_HETERO_VECTORS "vectors/avx512.h"
#define RAY_HETERO_TILES "tiles/software.h"
#define RAY_HETERO_HAS_TILES false
#define RAY_HETERO_HAS_BF16 1
#define RAY_HETERO_IS_HALF 0
#include "../level.h"

#endif

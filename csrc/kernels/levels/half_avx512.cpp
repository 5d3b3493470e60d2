// AVX-512, in float16: AMX has no products of these, and AVX512-FP16 adds up in float16.

#include "../kernels.h"

#if defined(__x86_64__)

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
#define RAY_HETERO_LEVEL half_avx512
#define RAY_HETERO_VECTORS "vectors/avx512.h"
#define RAY_HETERO_TILES "tiles/software.h"
#define RAY_HETERO_HAS_TILES false
#define RAY_HETERO_HAS_BF16 0
#define RAY_HETERO_IS_HALF 1
#include "../level.h"

#endif

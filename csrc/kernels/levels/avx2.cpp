// AVX2 with FMA and F16C: Haswell, Zen 1 to 3.

#include "../kernels.h"

#if defined(__x86_64__)

#pragma GCC target("avx2,fma,f16c")
#define RAY_HETERO_LEVEL avx2
#define RAY_HETERO_VECTORS "vectors/avx2.h"
#define RAY_HETERO_TILES "tiles/software.h"
#define RAY_HETERO_HAS_TILES false
#define RAY_HETERO_HAS_BF16 0
#define RAY_HETERO_IS_HALF 0
#include "../level.h"

#endif

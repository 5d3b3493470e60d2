// AVX-512, in C++: the kernels' own source over emulated instructions.

#include "kernels.h"

#include "target.h"
#include "emulated/avx512.h"

#define RAY_HETERO_LEVEL emulated_avx512
#define RAY_HETERO_VECTORS "emulated/over_avx512.h"
#define RAY_HETERO_TILES "tiles/software.h"
#define RAY_HETERO_HAS_TILES false
#define RAY_HETERO_HAS_BF16 0
#define RAY_HETERO_IS_HALF 0
#include "level.h"

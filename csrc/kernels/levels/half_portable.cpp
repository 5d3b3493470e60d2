// Plain C++, in float16.

#include "../kernels.h"

#define RAY_HETERO_LEVEL half_portable
#define RAY_HETERO_VECTORS "vectors/portable.h"
#define RAY_HETERO_TILES "tiles/software.h"
#define RAY_HETERO_HAS_TILES false
#define RAY_HETERO_HAS_BF16 0
#define RAY_HETERO_IS_HALF 1
#include "../level.h"

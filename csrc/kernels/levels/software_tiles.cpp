// Plain C++ with AMX's tiles in software: for tests of what uses tiles.

#include "../kernels.h"

#define RAY_HETERO_LEVEL software_tiles
#define RAY_HETERO_VECTORS "vectors/portable.h"
#define RAY_HETERO_TILES "tiles/software.h"
#define RAY_HETERO_HAS_TILES true
#define RAY_HETERO_HAS_BF16 0
#define RAY_HETERO_IS_HALF 0
#include "../level.h"

// The kernels' vectors of AVX-512, over emulated instructions.  Included once for each level.

namespace ray_hetero::RAY_HETERO_LEVEL {
using namespace emulated;
}

#include "vectors/avx512.h"

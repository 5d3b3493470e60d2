// The kernels of one level; levels.h says which and includes this for each.

#include RAY_HETERO_VECTORS

namespace ray_hetero::RAY_HETERO_LEVEL {
constexpr bool kHasTiles = RAY_HETERO_HAS_TILES;
}

#include RAY_HETERO_TILES

// In this order, as each uses what is before it.
#include "sums.h"
#include "tiles.h"
//
#include "formats/all.h"
//
#include "linear.h"
#include "experts.h"
#include "sum_over_ranks.h"
#include "post_attention.h"
#include "rotation.h"
//
#include "attention.h"
//
#include "decode_step.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

inline const Kernels kKernels{kHasTiles, run, run, rotate, run, run, run, expand};

}  // namespace ray_hetero::RAY_HETERO_LEVEL

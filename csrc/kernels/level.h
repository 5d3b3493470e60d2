// The kernels of one level; a file of levels/ says which, and includes this once.
//
// kernels.h comes before the file turns its instructions on: what is in there is shared by all
// levels, and the linker takes any level's copy of it.

#if RAY_HETERO_IS_HALF
// What is called bf16 in the names and comments of all that follows is float16 here.
namespace ray_hetero::RAY_HETERO_LEVEL {
RAY_HETERO_INLINE float as_float(std::uint16_t value) { return half_as_float(value); }
RAY_HETERO_INLINE std::uint16_t as_bf16(float value) { return as_half(value); }
}  // namespace ray_hetero::RAY_HETERO_LEVEL
#endif

#include RAY_HETERO_VECTORS

namespace ray_hetero::RAY_HETERO_LEVEL {
constexpr bool kHasTiles = RAY_HETERO_HAS_TILES;
constexpr bool kIsHalf = RAY_HETERO_IS_HALF;
}

#include RAY_HETERO_TILES

// In this order, as each uses what is before it.
#include "sums.h"
#include "tiles.h"
//
#include "formats/all.h"
//
#include "codes.h"
#include "widened.h"
#include "row_products.h"
#include "pieces.h"
#include "few_tokens.h"
#include "many_tokens.h"
#include "linear.h"
#include "adapters.h"
#include "activations.h"
#include "expert_activations.h"
#include "expert_tokens.h"
#include "expert_product.h"
#include "experts.h"
#include "sum_over_ranks.h"
#include "norms.h"
#include "post_attention.h"
#include "rotation.h"
//
#include "attention_heads.h"
#include "attention.h"
//
#include "decode_step.h"
#include "latent_lanes.h"
#include "latent_scores.h"
#include "latent_chunks.h"
#include "latent_attention.h"
#include "latent_layer.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

const Kernels& kernels() {
  static const Kernels made{kHasTiles, run, run, rotate, run, run, run, run, expand};
  return made;
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

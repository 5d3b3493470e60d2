// The kernels of one level; a file of levels/ says which, and includes this once.

#pragma once

#include "decode_step.h"
#include "experts.h"
#include "gated_delta_layer.h"
#include "kernels.h"
#include "latent_layer.h"
#include "linear.h"
#include "mamba2_mixer.h"
#include "post_attention.h"
#include "rotation.h"
#include "row_products.h"
#include "sum_over_ranks.h"
#include "this_level.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

const Kernels& kernels() {
  static const Kernels made{kHasTiles, run, run, rotate, run, run, run, run, run, run, expand};
  return made;
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

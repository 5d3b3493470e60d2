// What a level of instruction sets computes, and what the code of all levels stands on.
//
// Everything that is included here is compiled for any processor.

#pragma once

#include "attention_parts.h"
#include "denormals.h"
#include "layers.h"
#include "rank_sums.h"
#include "read_ahead.h"
#include "routing.h"
#include "scratch.h"
#include "sizes.h"
#include "team.h"
#include "tile_config.h"
#include "tokens.h"
#include "vectors.h"
#include "weight.h"
#include "work_queue.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace ray_hetero {

// What a level computes.
struct Kernels {
  bool has_tiles;
  void (*linear)(const Task&);
  // attended [m][k], residual [m][n] → sum [m][n], y [m][outputs()], all bf16; sum may be the
  // residual.
  void (*post_attention)(const PostAttention&, const std::uint16_t* attended,
                         const std::uint16_t* residual, std::int64_t m, std::uint16_t* sum,
                         std::uint16_t* y, AdapterSlots);
  // qkv [m][stride]: queries, then keys, of each token, in place.
  void (*rotate)(const Rotation&, std::uint16_t* qkv, std::int64_t stride,
                 const std::int64_t* positions, std::int64_t m);
  void (*decode_step)(const DecoderLayers&, const std::vector<Cache>&,
                      const std::vector<Requests>&, const Step&);
  void (*latent_layer)(const LatentLayer&, const LatentCache&, const Requests&, const Step&);
  void (*gated_delta_layer)(const GatedDeltaLayer&, const LinearStates&, const Step&);
  void (*mamba2_mixer)(const Mamba2Mixer&, const LinearStates&, const Step&);
  void (*experts)(const Experts&, const RoutedTokens&);
  // x [elements], float32 → y [elements], bf16: sums over all ranks, so many times.
  void (*sum_over_ranks)(RankSums&, const float* x, std::int64_t elements, std::uint16_t* y,
                         std::int64_t times);
  // Write a weight's rows as packed ones.
  void (*expand)(const Weight&, std::uint16_t* packed);
};

}  // namespace ray_hetero

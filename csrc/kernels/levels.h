// The kernels, compiled for several levels of a processor's instruction sets.
//
// There is one source: linear.h, attention.h, … are included once for each level, in a namespace of
// its own and compiled for its instructions, over the vectors and tiles that the level has.
// What is included here before belongs to all levels, and is compiled for any processor.
//
// One level's results depend neither on the number of threads nor on chance.  Those of two levels
// differ by the order and the rounding of sums in float32: for a sum of K products w · x by at most
// 2 · K · 2^-24 · Σ |w · x|, and by what this changes in later rounding.

#pragma once

#include "attention_parts.h"
#include "layers.h"
#include "processor.h"
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
                         std::uint16_t* y);
  // qkv [m][stride]: queries, then keys, of each token, in place.
  void (*rotate)(const Rotation&, std::uint16_t* qkv, std::int64_t stride,
                 const std::int64_t* positions, std::int64_t m);
  void (*decode_step)(const DecoderLayers&, const std::vector<Cache>&, const Requests&,
                      const Step&);
  void (*experts)(const Experts&, const RoutedTokens&);
  // x [elements], float32 → y [elements], bf16: sums over all ranks, so many times.
  void (*sum_over_ranks)(RankSums&, const float* x, std::int64_t elements, std::uint16_t* y,
                         std::int64_t times);
  // Write a weight's rows as packed ones.
  void (*expand)(const Weight&, std::uint16_t* packed);
};

}  // namespace ray_hetero

#define RAY_HETERO_TILES "tiles/software.h"
#define RAY_HETERO_HAS_BF16 0

#define RAY_HETERO_LEVEL portable
#define RAY_HETERO_VECTORS "vectors/portable.h"
#define RAY_HETERO_HAS_TILES false
#include "level.h"
#undef RAY_HETERO_LEVEL
#undef RAY_HETERO_HAS_TILES

#define RAY_HETERO_LEVEL software_tiles
#define RAY_HETERO_HAS_TILES true
#include "level.h"
#undef RAY_HETERO_LEVEL
#undef RAY_HETERO_HAS_TILES
#undef RAY_HETERO_VECTORS

#if defined(__x86_64__)

#define RAY_HETERO_HAS_TILES false

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define RAY_HETERO_LEVEL avx2
#define RAY_HETERO_VECTORS "vectors/avx2.h"
#include "level.h"
#undef RAY_HETERO_LEVEL
#undef RAY_HETERO_VECTORS
#pragma GCC pop_options

#define RAY_HETERO_VECTORS "vectors/avx512.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
#define RAY_HETERO_LEVEL avx512
#include "level.h"
#undef RAY_HETERO_LEVEL
#pragma GCC pop_options

#undef RAY_HETERO_HAS_BF16
#define RAY_HETERO_HAS_BF16 1

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
#define RAY_HETERO_LEVEL avx512_bf16
#include "level.h"
#undef RAY_HETERO_LEVEL
#undef RAY_HETERO_HAS_TILES

#undef RAY_HETERO_TILES
#define RAY_HETERO_TILES "tiles/amx.h"
#define RAY_HETERO_HAS_TILES true
#define RAY_HETERO_LEVEL amx
#include "level.h"
#undef RAY_HETERO_LEVEL
#undef RAY_HETERO_VECTORS
#undef RAY_HETERO_HAS_TILES
#pragma GCC pop_options

#endif

#undef RAY_HETERO_HAS_BF16
#undef RAY_HETERO_TILES

namespace ray_hetero {

// A set of instructions that kernels are compiled for.
struct Level {
  const char* name;
  bool (*is_here)();  // whether this process may use it
  const Kernels& kernels;
};

// From those for tests to the best.
inline const std::vector<Level>& all_levels() {
  static const std::vector<Level> levels = {
      {"software_tiles", [] { return true; }, software_tiles::kKernels},
      {"portable", [] { return true; }, portable::kKernels},
#if defined(__x86_64__)
      {"avx2", has_avx2, avx2::kKernels},
      {"avx512", has_avx512, avx512::kKernels},
      {"avx512_bf16", has_avx512_bf16, avx512_bf16::kKernels},
      {"amx", has_amx, amx::kKernels},
#endif
  };
  return levels;
}

// Those that this process may use; the last one is the best.
inline std::vector<Level> levels() {
  std::vector<Level> found;
  for (const Level& level : all_levels()) {
    if (level.is_here()) found.push_back(level);
  }
  return found;
}

}  // namespace ray_hetero

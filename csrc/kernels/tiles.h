// Up to two tiles of tokens times the two halves of a block.
//
// Included once for each level, see levels.h; tiles/ has a file for each kind of tiles.  TileConfig
// says which tile is what.

#pragma once

#include "this_level.h"

#include "formats/rows.h"
#include "read_ahead.h"
#include "tile_config.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

constexpr std::int64_t kSumStride = kBlock * sizeof(float);
constexpr std::int64_t kTokenStride = 2 * kTile * sizeof(std::uint16_t);

template <bool kTwo>
RAY_HETERO_INLINE void load_sums(const float* sums) {
  load_tile<0>(sums, kSumStride);
  load_tile<1>(sums + kTile, kSumStride);
  if constexpr (kTwo) {
    load_tile<2>(sums + kTile * kBlock, kSumStride);
    load_tile<3>(sums + kTile * kBlock + kTile, kSumStride);
  }
}

template <bool kTwo>
RAY_HETERO_INLINE void clear_sums() {
  clear_tile<0>();
  clear_tile<1>();
  if constexpr (kTwo) {
    clear_tile<2>();
    clear_tile<3>();
  }
}

template <bool kTwo>
RAY_HETERO_INLINE void store_sums(float* sums) {
  store_tile<0>(sums, kSumStride);
  store_tile<1>(sums + kTile, kSumStride);
  if constexpr (kTwo) {
    store_tile<2>(sums + kTile * kBlock, kSumStride);
    store_tile<3>(sums + kTile * kBlock + kTile, kSumStride);
  }
}

// 16 rows of W times up to 32 tokens, whose tiles of [tokens][32] begin at x.
template <bool kTwo>
RAY_HETERO_INLINE void multiply(const std::uint16_t* x, const std::uint16_t* w) {
  load_tile<6>(w, kRowBytes);
  load_tile<7>(w + kBlock, kRowBytes);
  load_tile<4>(x, kTokenStride);
  multiply_tiles<0, 4, 6>();
  multiply_tiles<1, 4, 7>();
  if constexpr (kTwo) {
    load_tile<5>(x + kTile * 2 * kTile, kTokenStride);
    multiply_tiles<2, 5, 6>();
    multiply_tiles<3, 5, 7>();
  }
}

// Of up to 16 tokens, the operands of the products with 16 rows of W, in one of two sets of tiles.
template <int kSet>
RAY_HETERO_INLINE void load_operands(const std::uint16_t* x, const std::uint16_t* w) {
  load_tile<kSet == 0 ? 6 : 2>(w, kRowBytes);
  load_tile<kSet == 0 ? 7 : 3>(w + kBlock, kRowBytes);
  load_tile<kSet == 0 ? 4 : 5>(x, kTokenStride);
}

// The products of one set, while the other's operands are loaded: in one set, these would wait until
// the products have read theirs.
template <int kSet>
RAY_HETERO_INLINE void multiply_and_load(const std::uint16_t* next_x, const std::uint16_t* next_w) {
  load_operands<1 - kSet>(next_x, next_w);
  multiply_tiles<0, kSet == 0 ? 4 : 5, kSet == 0 ? 6 : 2>();
  multiply_tiles<1, kSet == 0 ? 4 : 5, kSet == 0 ? 7 : 3>();
}

// Have the tiles of some tokens come, a line each: those of all rows are more than a first-level cache
// has room for beside the weights.
RAY_HETERO_PREFETCH void prefetch_tokens(const std::uint16_t* x, std::int64_t tokens) {
  for (std::int64_t token = 0; token < tokens; ++token) prefetch_l1(x + token * 2 * kTile);
}

inline void configure_tiles(std::int64_t tokens) { set_tiles(TileConfig(tokens)); }

// For how many tokens a thread has set its tiles up, which takes as long as some products; nothing
// where there are none.
class TileSetUp {
 public:
  void for_tokens(std::int64_t tokens) {
    if (!kHasTiles || tokens == tokens_) return;
    configure_tiles(tokens);
    tokens_ = tokens;
  }

 private:
  std::int64_t tokens_ = 0;
};

}  // namespace ray_hetero::RAY_HETERO_LEVEL

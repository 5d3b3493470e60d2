// AMX: up to two tiles of tokens times the two halves of a block.

#pragma once

#include "formats/packed.h"
#include "vectors.h"

#include <algorithm>
#include <cstdint>

namespace ray_hetero {

#if defined(__x86_64__)

// The intrinsics want literal numbers: tiles 0 to 3 are sums, 4 and 5 tokens, 6 and 7 weights.

// Operand of LDTILECFG, Intel SDM volume 1, table 18-2.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t bytes_per_row[16] = {};
  std::uint8_t rows[16] = {};

  // For up to 32 tokens.
  explicit TileConfig(std::int64_t tokens) {
    const auto first = static_cast<std::uint8_t>(std::min<std::int64_t>(tokens, kTile));
    const auto second = static_cast<std::uint8_t>(tokens - first);
    const std::uint8_t heights[8] = {first, first, second, second, first, second, kTile, kTile};
    for (int tile = 0; tile < 8; ++tile) {
      rows[tile] = heights[tile];
      bytes_per_row[tile] = heights[tile] ? 64 : 0;
    }
  }
};

constexpr int kSumStride = kBlock * sizeof(float);
constexpr int kTokenStride = 2 * kTile * sizeof(std::uint16_t);

template <bool kTwo>
RAY_HETERO_AMX inline void load_sums(const float* sums) {
  _tile_loadd(0, sums, kSumStride);
  _tile_loadd(1, sums + kTile, kSumStride);
  if constexpr (kTwo) {
    _tile_loadd(2, sums + kTile * kBlock, kSumStride);
    _tile_loadd(3, sums + kTile * kBlock + kTile, kSumStride);
  }
}

template <bool kTwo>
RAY_HETERO_AMX inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <bool kTwo>
RAY_HETERO_AMX inline void store_sums(float* sums) {
  _tile_stored(0, sums, kSumStride);
  _tile_stored(1, sums + kTile, kSumStride);
  if constexpr (kTwo) {
    _tile_stored(2, sums + kTile * kBlock, kSumStride);
    _tile_stored(3, sums + kTile * kBlock + kTile, kSumStride);
  }
}

// 16 rows of W times up to 32 tokens, whose tiles of [tokens][32] begin at x.
template <bool kTwo>
RAY_HETERO_AMX inline void multiply(const std::uint16_t* x, const std::uint16_t* w) {
  _tile_loadd(6, w, kRowBytes);
  _tile_loadd(7, w + kBlock, kRowBytes);
  _tile_loadd(4, x, kTokenStride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kTwo) {
    _tile_loadd(5, x + kTile * 2 * kTile, kTokenStride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

RAY_HETERO_AMX inline void configure_tiles(std::int64_t tokens) {
  const TileConfig config(tokens);
  _tile_loadconfig(&config);
}

RAY_HETERO_AMX inline void release_tiles() { _tile_release(); }

#endif

}  // namespace ray_hetero

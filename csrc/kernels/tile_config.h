// How tiles are set up for a number of tokens.

#pragma once

#include "formats/rows.h"

#include <algorithm>
#include <cstdint>

namespace ray_hetero {

// Operand of LDTILECFG, Intel SDM volume 1, table 18-2.  Tiles 0 to 3 are sums, 4 and 5 tokens, 6 and
// 7 weights; for up to 16 tokens, 2, 3 and 5 are weights and tokens too.
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
    const bool has_second = second > 0;
    const std::uint8_t sums_or_weights = has_second ? second : std::uint8_t{kTile};
    const std::uint8_t heights[8] = {first, first, sums_or_weights, sums_or_weights,
                                     first, has_second ? second : first, kTile, kTile};
    for (int tile = 0; tile < 8; ++tile) {
      rows[tile] = heights[tile];
      bytes_per_row[tile] = 64;
    }
  }
};

}  // namespace ray_hetero

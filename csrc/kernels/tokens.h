// Where the tokens of a step are in memory.

#pragma once

#include "formats/rows.h"

#include <cstdint>

namespace ray_hetero {

// Bf16 of some tokens from some row on, which begins a tile: 16 pairs of a token are neighbours.
struct TokenTiles {
  const std::uint16_t* data;
  std::int64_t token, tile;  // elements from a token to the next, and from a tile to the next
  // Sums of each token's inputs [tokens][groups], where a weight's groups have zero points and
  // somebody has made them.
  const float* group_sums = nullptr;
  std::int64_t groups = 0;
  // Each token's inputs in float32 [tokens][inputs], where somebody has made them.
  const float* floats = nullptr;
  std::int64_t inputs = 0;

  const std::uint16_t* at(std::int64_t row) const {
    return data + row / kTile * tile + row % kTile * 2;
  }
  // The same from a row on, which begins a tile.
  TokenTiles from_row(std::int64_t row) const {
    const float* own = floats == nullptr ? nullptr : floats + 2 * row;
    return {at(row), token, tile, group_sums, groups, own, inputs};
  }
  // The same from a token on.
  TokenTiles from_token(std::int64_t first) const {
    const float* sums = group_sums == nullptr ? nullptr : group_sums + first * groups;
    const float* own = floats == nullptr ? nullptr : floats + first * inputs;
    return {data + first * token, token, tile, sums, groups, own, inputs};
  }
};

// Where bf16 of tokens are: row by row [m][stride], or as tiles [stride / 32][room][32], which AMX
// loads as they lie.
struct Places {
  std::int64_t m, stride;
  bool are_tiles;
  std::int64_t more = 0;  // tokens that tiles have room for besides these

  std::int64_t room() const { return m + more; }
  std::int64_t elements() const { return m * stride; }
  // Of a token's element i; the others of the same 32 are beside it.
  std::int64_t at(std::int64_t token, std::int64_t i) const {
    if (!are_tiles) return token * stride + i;
    return (i / (2 * kTile) * room() + token) * 2 * kTile + i % (2 * kTile);
  }
  // From a row on, of bf16 that begin at x.
  TokenTiles tiles(const std::uint16_t* x, std::int64_t row) const {
    const std::uint16_t* data = x + at(0, 2 * row);
    if (are_tiles) return {data, 2 * kTile, room() * 2 * kTile};
    return {data, stride, 2 * kTile};
  }
};

}  // namespace ray_hetero

// Where the tokens of a step are in memory.

#pragma once

#include "formats/rows.h"

#include <cstdint>

namespace ray_hetero {

// Where bf16 of tokens are: row by row [m][stride], or as tiles [stride / 32][m][32], which AMX
// loads as they lie.
struct Places {
  std::int64_t m, stride;
  bool are_tiles;

  std::int64_t elements() const { return m * stride; }
  // Of a token's element i; the others of the same 32 are beside it.
  std::int64_t at(std::int64_t token, std::int64_t i) const {
    if (!are_tiles) return token * stride + i;
    return (i / (2 * kTile) * m + token) * 2 * kTile + i % (2 * kTile);
  }
};

}  // namespace ray_hetero

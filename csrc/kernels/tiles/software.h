// Tiles of AMX-BF16 in software: the semantics are those of Intel's SDM, volume 2, TILELOADD,
// TDPBF16PS, ….  For tests of what is computed with tiles, on processors that have none.
//
// Included once for each level that has these tiles, see levels.h.

#pragma once

#include "../formats/rows.h"
#include "../tile_config.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

struct Tile {
  int rows, bytes;  // bytes of a row
  unsigned char data[kTile][64];
};

inline Tile& tile(int number) {
  static thread_local Tile tiles[8];
  return tiles[number];
}

template <int kNumber>
void load_tile(const void* at, std::int64_t stride) {
  Tile& to = tile(kNumber);
  for (int row = 0; row < to.rows; ++row) {
    std::memcpy(to.data[row], static_cast<const char*>(at) + row * stride, to.bytes);
  }
}

template <int kNumber>
void store_tile(void* at, std::int64_t stride) {
  const Tile& from = tile(kNumber);
  for (int row = 0; row < from.rows; ++row) {
    std::memcpy(static_cast<char*>(at) + row * stride, from.data[row], from.bytes);
  }
}

template <int kNumber>
void clear_tile() {
  std::memset(tile(kNumber).data, 0, sizeof(Tile::data));
}

template <int kSums, int kLeft, int kRight>
void multiply_tiles() {
  Tile& to = tile(kSums);
  const Tile &left = tile(kLeft), &right = tile(kRight);
  for (int row = 0; row < to.rows; ++row) {
    float sums[kTile];
    std::memcpy(sums, to.data[row], sizeof(sums));
    for (int pair = 0; pair < left.bytes / 4; ++pair) {
      std::uint16_t x[2], w[2 * kTile];
      std::memcpy(x, left.data[row] + 4 * pair, sizeof(x));
      std::memcpy(w, right.data[pair], sizeof(w));
      const float first = as_float(x[0]), second = as_float(x[1]);
      for (int column = 0; column < to.bytes / 4; ++column) {
        sums[column] += first * as_float(w[2 * column]);
        sums[column] += second * as_float(w[2 * column + 1]);
      }
    }
    std::memcpy(to.data[row], sums, sizeof(sums));
  }
}

inline void set_tiles(const TileConfig& config) {
  for (int number = 0; number < 8; ++number) {
    tile(number) = {config.rows[number], config.bytes_per_row[number], {}};
  }
}

inline void release_tiles() {}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

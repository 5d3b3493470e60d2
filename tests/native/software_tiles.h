// The AMX instructions that csrc uses, in software: for processors without AMX.
//
// Include this before the headers of csrc.  Semantics: Intel SDM volume 2, TILELOADD, TDPBF16PS, ….

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace software_tiles {

struct Tile {
  int rows, bytes;  // of a row
  unsigned char data[16][64];
};

inline Tile& tile(int number) {
  static thread_local Tile tiles[8];
  return tiles[number];
}

inline void configure(const void* given) {
  const auto* config = static_cast<const unsigned char*>(given);
  for (int number = 0; number < 8; ++number) {
    std::uint16_t bytes;
    std::memcpy(&bytes, config + 16 + 2 * number, sizeof(bytes));
    tile(number) = {config[48 + number], bytes, {}};
  }
}

inline void load(int number, const void* from, long stride) {
  Tile& to = tile(number);
  for (int row = 0; row < to.rows; ++row) {
    std::memcpy(to.data[row], static_cast<const char*>(from) + row * stride, to.bytes);
  }
}

inline void store(int number, void* to, long stride) {
  const Tile& from = tile(number);
  for (int row = 0; row < from.rows; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, from.data[row], from.bytes);
  }
}

inline void zero(int number) { std::memset(tile(number).data, 0, sizeof(Tile::data)); }

inline float element(const Tile& tile, int row, int column) {
  std::uint16_t value;
  std::memcpy(&value, tile.data[row] + 2 * column, sizeof(value));
  const std::uint32_t bits = std::uint32_t{value} << 16;
  float widened;
  std::memcpy(&widened, &bits, sizeof(widened));
  return widened;
}

inline void multiply(int sums, int left, int right) {
  Tile& to = tile(sums);
  const Tile &a = tile(left), &b = tile(right);
  for (int row = 0; row < to.rows; ++row) {
    for (int column = 0; column < to.bytes / 4; ++column) {
      float sum;
      std::memcpy(&sum, to.data[row] + 4 * column, sizeof(sum));
      for (int k = 0; k < a.bytes / 4; ++k) {
        for (int half = 0; half < 2; ++half) {
          sum += element(a, row, 2 * k + half) * element(b, k, 2 * column + half);
        }
      }
      std::memcpy(to.data[row] + 4 * column, &sum, sizeof(sum));
    }
  }
}

}  // namespace software_tiles

#undef _tile_dpbf16ps
#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_release
#undef _tile_stored
#undef _tile_zero
#define _tile_dpbf16ps(sums, left, right) software_tiles::multiply(sums, left, right)
#define _tile_loadconfig(config) software_tiles::configure(config)
#define _tile_loadd(number, from, stride) software_tiles::load(number, from, stride)
#define _tile_release() static_cast<void>(0)
#define _tile_stored(number, to, stride) software_tiles::store(number, to, stride)
#define _tile_zero(number) software_tiles::zero(number)

// AMX's tiles in C++, with the functions of csrc/kernels/tiles/amx.h, each of which is one instruction.
//
// What they do is what "Intel 64 and IA-32 Architectures Software Developer's Manual", volume 2, says
// of LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TDPBF16PS and TILERELEASE.  Where a processor would
// raise #UD or #GP, the process ends and says why.  Unlike csrc/kernels/tiles/software.h, whose tiles
// are as forgiving as tests of the products need, tiles are those of a thread that has set them up.

#pragma once

#include "avx512.h"

namespace ray_hetero::emulated {

constexpr int kTiles = 8, kMostRows = 16, kMostBytes = 64;

struct Tile {
  int rows, bytes;  // bytes of a row
  unsigned char data[kMostRows][kMostBytes];
};

struct Tiles {
  bool are_set_up;
  Tile tile[kTiles];
};

inline Tiles& tiles() {
  static thread_local Tiles own{};
  return own;
}

inline Tile& tile(int number) {
  if (!tiles().are_set_up) fail("a tile is used by a thread that has not set up its tiles");
  Tile& found = tiles().tile[number];
  if (found.rows == 0) fail("a tile is used that was set up without rows");
  return found;
}

// Rows that an instruction writes are whole: what the tile is not set up for becomes zeros.
inline void clear_rest(Tile& of) {
  for (int row = 0; row < kMostRows; ++row) {
    const int kept = row < of.rows ? of.bytes : 0;
    std::memset(of.data[row] + kept, 0, kMostBytes - kept);
  }
}

template <int kNumber>
void load_tile(const void* at, std::int64_t stride) {
  Tile& to = tile(kNumber);
  for (int row = 0; row < to.rows; ++row) {
    std::memcpy(to.data[row], static_cast<const char*>(at) + row * stride, to.bytes);
  }
  clear_rest(to);
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

// The lower and the upper halves are summed apart, from zero on; their sum is added to the tile's.
inline void multiply_shapes(Tile& to, const Tile& left, const Tile& right) {
  if (to.bytes % 4 != 0 || left.bytes % 4 != 0 || right.bytes % 4 != 0 || to.rows != left.rows ||
      to.bytes != right.bytes || left.bytes / 4 != right.rows) {
    fail("the shapes of tiles that are multiplied do not fit together");
  }
  const int columns = to.bytes / 4;
  for (int row = 0; row < to.rows; ++row) {
    float lower[kMostBytes / 4] = {}, upper[kMostBytes / 4] = {}, sums[kMostBytes / 4] = {};
    for (int pair = 0; pair < right.rows; ++pair) {
      std::uint32_t w[kMostBytes / 4];
      const auto x = loaded<std::uint32_t>(left.data[row] + 4 * pair);
      std::memcpy(w, right.data[pair], sizeof(w));
      for (int i = 0; i < kMostBytes / 4; ++i) {
        lower[i] = multiplied_and_added(float_of(x << 16), float_of(w[i] << 16), lower[i]);
        upper[i] = multiplied_and_added(float_of(x & 0xffff0000), float_of(w[i] & 0xffff0000),
                                        upper[i]);
      }
    }
    std::memcpy(sums, to.data[row], 4 * columns);
    for (int i = 0; i < columns; ++i) {
      sums[i] = flushed(flushed(sums[i]) + flushed(lower[i] + upper[i]));
    }
    std::memcpy(to.data[row], sums, 4 * columns);
  }
  clear_rest(to);
}

template <int kSums, int kLeft, int kRight>
void multiply_tiles() {
  static_assert(kSums != kLeft && kSums != kRight && kLeft != kRight, "#UD");
  multiply_shapes(tile(kSums), tile(kLeft), tile(kRight));
}

// Takes the 64 bytes as the processor does, not as TileConfig: palette, start row, 14 reserved ones,
// 16 · 2 of bytes in a row, 16 of rows.
inline void set_tiles_of(const unsigned char* config) {
  Tiles& made = tiles();
  made = {};
  if (config[0] == 0) return;
  if (config[0] != 1) fail("tiles are set up for a palette that is not there");
  if (config[1] >= kMostRows) fail("tiles are set up to start behind their last row");
  for (int i = 2; i < 64; ++i) {
    const bool is_reserved = i < 16 || (i >= 16 + 2 * kTiles && i < 48) || i >= 48 + kTiles;
    if (is_reserved && config[i] != 0) fail("tiles are set up with reserved bytes");
  }
  for (int number = 0; number < kTiles; ++number) {
    const int bytes = loaded<std::uint16_t>(config + 16 + 2 * number), rows = config[48 + number];
    if (bytes > kMostBytes || rows > kMostRows || (bytes == 0) != (rows == 0)) {
      fail("a tile is set up with more rows or bytes than there are, or with one of both only");
    }
    made.tile[number].rows = rows;
    made.tile[number].bytes = bytes;
  }
  made.are_set_up = true;
}

template <typename Config>
void set_tiles(const Config& config) {
  static_assert(sizeof(Config) == 64);
  set_tiles_of(reinterpret_cast<const unsigned char*>(&config));
}

inline void release_tiles() { tiles() = {}; }

}  // namespace ray_hetero::emulated

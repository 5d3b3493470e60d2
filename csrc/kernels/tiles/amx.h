// Tiles of AMX-BF16, by its instructions: the numbers of tiles are part of them.
//
// Included once for each level that has these tiles, see levels.h.

#pragma once

#include "../formats/rows.h"
#include "../tile_config.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

template <int kNumber>
RAY_HETERO_INLINE void load_tile(const void* at, std::int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(at), "r"(stride), "i"(kNumber) : "memory");
}

template <int kNumber>
RAY_HETERO_INLINE void store_tile(void* at, std::int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(at), "r"(stride), "i"(kNumber) : "memory");
}

template <int kNumber>
RAY_HETERO_INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kNumber));
}

// kSums += kLeft · kRight.
template <int kSums, int kLeft, int kRight>
RAY_HETERO_INLINE void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kLeft), "i"(kRight));
}

RAY_HETERO_INLINE void set_tiles(const TileConfig& config) {
  asm volatile("ldtilecfg %0" : : "m"(config));
}

RAY_HETERO_INLINE void release_tiles() { asm volatile("tilerelease"); }

}  // namespace ray_hetero::RAY_HETERO_LEVEL

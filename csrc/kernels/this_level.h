// The level that is being compiled: its vectors, its tiles, and what it has; a file of levels/ says which.
//
// kernels.h comes before such a file turns its instructions on: what is in there is shared by all
// levels, and the linker takes any level's copy of it.  For the same reason the headers of a level
// include no others of the standard library than kernels.h does.
//
// Without a level, as in an editor or where a header is checked by itself, this is the portable one.

#pragma once

#include "kernels.h"

#ifndef RAY_HETERO_LEVEL
#define RAY_HETERO_LEVEL portable
#define RAY_HETERO_VECTORS "vectors/portable.h"
#define RAY_HETERO_TILES "tiles/software.h"
#define RAY_HETERO_HAS_TILES false
#define RAY_HETERO_HAS_BF16 0
#define RAY_HETERO_IS_HALF 0
#endif

#if RAY_HETERO_IS_HALF
// What is called bf16 in the names and comments of all that follows is float16 here.
namespace ray_hetero::RAY_HETERO_LEVEL {
RAY_HETERO_INLINE float as_float(std::uint16_t value) { return half_as_float(value); }
RAY_HETERO_INLINE std::uint16_t as_bf16(float value) { return as_half(value); }
}  // namespace ray_hetero::RAY_HETERO_LEVEL
#endif

#include RAY_HETERO_VECTORS

namespace ray_hetero::RAY_HETERO_LEVEL {
constexpr bool kHasTiles = RAY_HETERO_HAS_TILES;
constexpr bool kIsHalf = RAY_HETERO_IS_HALF;
}  // namespace ray_hetero::RAY_HETERO_LEVEL

#include RAY_HETERO_TILES

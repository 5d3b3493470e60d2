// Scores of cached latents: products of tokens with packed queries, with tiles and without.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "formats/rows.h"
#include "tiles.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

// Scores [tokens][kBlock] of one or two tiles of cached tokens for a block of queries; `kRight` is
// whether more than 16 of its lanes are used.
template <bool kTwo, bool kRight>
void score_latents(const std::uint16_t* first, const std::uint16_t* second, std::int64_t stride,
                   const std::uint16_t* queries, std::int64_t size, float* scores) {
  const auto bytes = static_cast<std::int64_t>(stride * sizeof(std::uint16_t));
  clear_tile<0>();
  if constexpr (kRight) clear_tile<1>();
  if constexpr (kTwo) clear_tile<2>();
  if constexpr (kTwo && kRight) clear_tile<3>();
  for (std::int64_t at = 0; at < size; at += 2 * kTile, queries += kTile * kRow) {
    load_tile<6>(queries, kRowBytes);
    if constexpr (kRight) load_tile<7>(queries + kBlock, kRowBytes);
    load_tile<4>(first + at, bytes);
    multiply_tiles<0, 4, 6>();
    if constexpr (kRight) multiply_tiles<1, 4, 7>();
    if constexpr (kTwo) {
      load_tile<5>(second + at, bytes);
      multiply_tiles<2, 5, 6>();
      if constexpr (kRight) multiply_tiles<3, 5, 7>();
    }
  }
  store_tile<0>(scores, kSumStride);
  if constexpr (kRight) store_tile<1>(scores + kTile, kSumStride);
  if constexpr (kTwo) store_tile<2>(scores + kTile * kBlock, kSumStride);
  if constexpr (kTwo && kRight) store_tile<3>(scores + kTile * kBlock + kTile, kSumStride);
}

// The same of M tokens without tiles, for queries of which at most 16 lanes are used.
template <int M>
void score_left(const std::uint16_t* tokens, std::int64_t stride, const std::uint16_t* queries,
                std::int64_t size, float* scores) {
  Floats sums[M];
  for (Floats& sum : sums) sum = zeros();
  for (std::int64_t at = 0; at < size; at += 2, queries += kRow) {
    const Pairs left = load_pairs(queries);
    for (int i = 0; i < M; ++i) {
      sums[i] = dot(sums[i], left, spread_pair(tokens + i * stride + at));
    }
  }
  for (int i = 0; i < M; ++i) store_floats(scores + i * kBlock, sums[i]);
}

using ScoreLeft = void (*)(const std::uint16_t*, std::int64_t, const std::uint16_t*, std::int64_t,
                           float*);
template <int... kLess>
constexpr std::array<ScoreLeft, kGroup> score_left_of(std::integer_sequence<int, kLess...>) {
  return {score_left<kLess + 1>...};
}
constexpr std::array<ScoreLeft, kGroup> kScoreLeft =
    score_left_of(std::make_integer_sequence<int, kGroup>());

}  // namespace ray_hetero::RAY_HETERO_LEVEL

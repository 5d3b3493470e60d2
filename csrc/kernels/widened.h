// Products of several tokens with float16, whose conversion to float32 takes longer than they do:
// some rows of a weight and the tokens' inputs for them are converted first, each once.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "formats/rows.h"
#include "sums.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

constexpr std::int64_t kWideRows = 64;   // of a weight, which a first-level cache has room for
constexpr std::int64_t kWideTokens = 3;  // from which on it pays

// Sums [M][kBlock] of M tokens plus what some inputs add to them.
template <int M>
void add_wide(const float* x, const float* w, std::int64_t inputs, float* to) {
  Sums<M> sums;
  sums.load(to, kBlock);
  for (std::int64_t input = 0; input < inputs; ++input, w += kBlock) {
    const Floats left = load_floats(w), right = load_floats(w + kLanes);
    for (int i = 0; i < M; ++i) {
      const Floats one = spread(x[i * 2 * kWideRows + input]);
      sums.left[i] = times_plus(left, one, sums.left[i]);
      sums.right[i] = times_plus(right, one, sums.right[i]);
    }
  }
  sums.store(to, kBlock);
}

using AddWide = void (*)(const float*, const float*, std::int64_t, float*);
template <int... kLess>
constexpr std::array<AddWide, kGroup> add_wide_of(std::integer_sequence<int, kLess...>) {
  return {add_wide<kLess + 1>...};
}
constexpr std::array<AddWide, kGroup> kAddWide =
    add_wide_of(std::make_integer_sequence<int, kGroup>());

// Sums [tokens][kBlock] of tokens, `stride` elements apart, of some rows; or what these add to them.
inline void add_widened(const std::uint16_t* x, std::int64_t stride, std::int64_t tokens,
                        const std::uint16_t* w, std::int64_t rows, bool is_first, float* sums) {
  alignas(64) float weights[2 * kWideRows * kBlock], inputs[kGroup * 2 * kWideRows];
  if (is_first) {
    for (std::int64_t at = 0; at < tokens * kBlock; at += kLanes) store_floats(sums + at, zeros());
  }
  for (std::int64_t row = 0; row < rows; row += kWideRows, x += 2 * kWideRows) {
    const std::int64_t here = std::min(kWideRows, rows - row);
    float* to = weights;
    for (std::int64_t i = 0; i < here; ++i, w += kRow, to += 2 * kBlock) {
      prefetch_lines(reinterpret_cast<const std::uint8_t*>(w), kRowBytes);
      const Pairs left = load_pairs(w), right = load_pairs(w + kBlock);
      store_floats(to, firsts(left));
      store_floats(to + kLanes, firsts(right));
      store_floats(to + kBlock, seconds(left));
      store_floats(to + kBlock + kLanes, seconds(right));
    }
    for (std::int64_t token = 0; token < tokens; token += kGroup) {
      const std::int64_t group = std::min<std::int64_t>(kGroup, tokens - token);
      for (std::int64_t i = 0; i < group; ++i) {
        const std::uint16_t* from = x + (token + i) * stride;
        for (std::int64_t at = 0; at < 2 * here; at += kLanes) {
          store_floats(inputs + i * 2 * kWideRows + at, load_bf16(from + at));
        }
      }
      kAddWide[group - 1](inputs, weights, 2 * here, sums + token * kBlock);
    }
  }
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

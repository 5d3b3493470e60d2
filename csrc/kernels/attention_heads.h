// Scores of cached keys and sums of cached values, for some heads of queries that share a head of
// keys, in each of vLLM's layouts.
//
// Meanwhile what comes next is brought into the second-level cache, a line for each one that is
// read: a burst would take all fill buffers of the first-level cache, and what is multiplied would
// wait for memory too.  It begins at `ahead`, and lies as what is multiplied does.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "layers.h"
#include "read_ahead.h"
#include "sums.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

// sums += values · by(head) for each head, in float.
template <int kHeads, typename By>
RAY_HETERO_INLINE void add_scaled(const std::uint16_t* values, By by,
                                                  Sums<kHeads>& sums) {
  const Floats left = load_bf16(values), right = load_bf16(values + kTile);
  for (int head = 0; head < kHeads; ++head) {
    const Floats one = spread(by(head));
    sums.left[head] = times_plus(left, one, sums.left[head]);
    sums.right[head] = times_plus(right, one, sums.right[head]);
  }
}

// Scores of 32 tokens: [kHeads][kChunk] = q [kHeads][size] · keys.
template <int kHeads>
void score_tiles(const std::uint16_t* q, std::int64_t size, const std::uint16_t* keys, std::int64_t,
                 const std::uint16_t* ahead, float* scores) {
  Sums<kHeads> sums;
  sums.clear();
  const std::uint16_t* next = keys + kTile * size;
  for (std::int64_t at = 0; at < size; at += 2) {
    prefetch_l2(ahead);
    prefetch_l2(ahead + kTile * size);
    add_row(q + at, size, load_pairs(keys), load_pairs(next), sums);
    keys += 2 * kTile, next += 2 * kTile, ahead += 2 * kTile;
  }
  sums.store(scores, kChunk);
}

template <int kHeads>
void score_rows(const std::uint16_t* q, std::int64_t size, const std::uint16_t* keys,
                std::int64_t block, const std::uint16_t* ahead, float* scores) {
  Sums<kHeads> sums;
  sums.clear();
  for (std::int64_t at = 0; at < size; ++at, keys += block, ahead += block) {
    prefetch_l2(ahead);
    add_scaled(keys, [&](int head) { return as_float(q[head * size + at]); }, sums);
  }
  sums.store(scores, kChunk);
}

// Sums of 32 elements of values: [kHeads][stride] += shares of up to 32 tokens · values.  What lies
// behind these tokens is somebody else's, or nobody's: it may be NaN, and must not be multiplied,
// not even with 0.
template <int kHeads>
void add_tiles_of_values(const float* shares, const std::uint16_t* values, std::int64_t block,
                         std::int64_t tokens, std::int64_t stride, const std::uint16_t* ahead,
                         float* to) {
  // As vLLM's kernel multiplies them, in bf16.
  std::uint16_t rounded_shares[kHeads][kSpan];
  for (int head = 0; head < kHeads; ++head) {
    store_bf16(rounded_shares[head], load_floats(shares + head * kChunk));
    store_bf16(rounded_shares[head] + kTile, load_floats(shares + head * kChunk + kTile));
  }
  Sums<kHeads> sums;
  sums.load(to, stride);
  const std::uint16_t* next = values + kTile * block;
  std::int64_t at = 0;
  for (; at + 2 <= tokens; at += 2) {
    prefetch_l2(ahead);
    prefetch_l2(ahead + kTile * block);
    add_row(rounded_shares[0] + at, kSpan, load_pairs(values), load_pairs(next), sums);
    values += 2 * kTile, next += 2 * kTile, ahead += 2 * kTile;
  }
  if (at < tokens) {
    add_row(rounded_shares[0] + at, kSpan, without_seconds(load_pairs(values)),
            without_seconds(load_pairs(next)), sums);
  }
  sums.store(to, stride);
}

template <int kHeads>
void add_rows_of_values(const float* shares, const std::uint16_t* values, std::int64_t,
                        std::int64_t tokens, std::int64_t stride, const std::uint16_t* ahead,
                        float* to) {
  Sums<kHeads> sums;
  sums.load(to, stride);
  for (std::int64_t at = 0; at < tokens; ++at, values += stride, ahead += stride) {
    prefetch_l2(ahead);
    add_scaled(values, [&](int head) { return shares[head * kChunk + at]; }, sums);
  }
  sums.store(to, stride);
}

using Score = void (*)(const std::uint16_t*, std::int64_t, const std::uint16_t*, std::int64_t,
                       const std::uint16_t*, float*);
using AddValues = void (*)(const float*, const std::uint16_t*, std::int64_t, std::int64_t,
                           std::int64_t, const std::uint16_t*, float*);

// What a layout is computed with, for one head of queries and more.
struct HeadKernels {
  Score score[kGroup];
  AddValues add_values[kGroup];
};

template <int... kLess>
constexpr std::array<HeadKernels, 2> head_kernels(std::integer_sequence<int, kLess...>) {
  return {{{{score_tiles<kLess + 1>...}, {add_tiles_of_values<kLess + 1>...}},
           {{score_rows<kLess + 1>...}, {add_rows_of_values<kLess + 1>...}}}};
}
constexpr std::array<HeadKernels, 2> kHeadKernels =
    head_kernels(std::make_integer_sequence<int, kGroup>());

}  // namespace ray_hetero::RAY_HETERO_LEVEL

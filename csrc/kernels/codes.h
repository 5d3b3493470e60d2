// Products of few tokens with weights that are codes with scales.
//
// Included once for each level, see levels.h.
//
// A code is exact in bf16, and its group's scale is the same for all tokens: so codes are multiplied
// as they are, and a group's sum is scaled before it is added to the others.  A weight then costs
// what its code takes to become a bf16, and no scale is rounded.  Zero points are subtracted from the
// sum too, times the sum of the group's inputs.
//
// With tiles, a group's sums leave the tile registers; for one token, and where groups are no whole
// tiles, dot products of vectors are cheaper.  The sums of such short groups cost more than scaled
// weights once there are several tokens.

#pragma once

#include "this_level.h"

#include "formats/all.h"
#include "read_ahead.h"
#include "scratch.h"
#include "sums.h"
#include "tiles.h"
#include "tokens.h"
#include "weight.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

// Sum of a token's inputs of some rows, the first of which are from `row` on.
inline float sum_of_inputs(const TokenTiles& x, std::int64_t token, std::int64_t row,
                           std::int64_t rows) {
  alignas(4) static constexpr std::uint16_t kOnes[2] = {0x3f80, 0x3f80};
  const Pairs ones = spread_pair(kOnes);
  Floats sums = zeros();
  float more = 0;
  for (const std::int64_t end = row + rows; row < end;) {
    const std::uint16_t* pairs = x.at(row) + token * x.token;
    if (row % kTile == 0 && end - row >= kTile) {
      sums = dot(sums, load_pairs(pairs), ones);
      row += kTile;
    } else {
      more += as_float(pairs[0]) + as_float(pairs[1]);
      ++row;
    }
  }
  return sum_of(sums) + more;
}

// The same of some rows of a group.
inline float sum_of_inputs(const TokenTiles& x, const Groups& groups, std::int64_t group,
                           std::int64_t token, std::int64_t begin, std::int64_t end) {
  if (x.group_sums != nullptr && groups.is_whole(group, begin, end)) {
    return x.group_sums[token * x.groups + group];
  }
  return sum_of_inputs(x, token, begin, end - begin);
}

// Sums of the inputs of m tokens [m][groups] that a weight's zero points are multiplied with: once
// here instead of in each of its blocks.  Of the last group only if it is a whole one.
inline void sum_groups(const Scaled& encoding, const TokenTiles& x, std::int64_t m, float* sums) {
  const std::int64_t rows = encoding.group() / 2;
  for (std::int64_t token = 0; token < m; ++token, sums += encoding.groups()) {
    for (std::int64_t group = 0; (group + 1) * rows <= encoding.pairs(); ++group) {
      sums[group] = sum_of_inputs(x, token, group * rows, rows);
    }
  }
}

// A group's sums of one token, of codes as kernels have them, scaled and added to others.
RAY_HETERO_INLINE void add_scaled(const GroupScales& scales, bool has_zeros, float inputs,
                                  Floats left, Floats right, float* to) {
  if (has_zeros) {
    left = minus(left, times(scales.zero_left, spread(inputs)));
    right = minus(right, times(scales.zero_right, spread(inputs)));
  }
  store_floats(to, times_plus(left, scales.left, load_floats(to)));
  store_floats(to + kLanes, times_plus(right, scales.right, load_floats(to + kLanes)));
}

RAY_HETERO_INLINE void clear(float* sums, std::int64_t tokens) {
  for (std::int64_t at = 0; at < tokens * kBlock; at += kLanes) store_floats(sums + at, zeros());
}

// ---- without tiles ------------------------------------------------------------------------------

// Rows of codes that are bf16 already.
class ExpandedCodes {
 public:
  static constexpr std::int64_t kPairBytes = 0;  // they are in the cache

  RAY_HETERO_INLINE explicit ExpandedCodes(const std::uint16_t* at) : at_(at) {}

  RAY_HETERO_INLINE const std::uint8_t* at() const { return nullptr; }
  RAY_HETERO_INLINE TwoRows next() {
    const std::uint16_t* rows = at_;
    at_ += 2 * kRow;
    return {{load_pairs(rows), load_pairs(rows + kRow)},
            {load_pairs(rows + kBlock), load_pairs(rows + kRow + kBlock)}};
  }

 private:
  const std::uint16_t* at_;
};

// Add to sums [M][kBlock] what a group's rows from `begin` to `end` add, whose sums are in one chain
// or two.
template <int M, std::size_t kChains>
RAY_HETERO_INLINE void add_chains(const TokenTiles& x, const ScalesAhead& scales,
                                  std::int64_t group, std::int64_t begin, std::int64_t end,
                                  const Sums<M> (&chains)[kChains], float* to) {
  const Groups& groups = scales.groups();
  const bool has_zeros = groups.encoding().has_zeros();
  const GroupScales own = scales.at(group);
  for (int token = 0; token < M; ++token) {
    Floats left = chains[0].left[token], right = chains[0].right[token];
    if constexpr (kChains > 1) {
      left = plus(left, chains[1].left[token]);
      right = plus(right, chains[1].right[token]);
    }
    const float inputs = has_zeros ? sum_of_inputs(x, groups, group, token, begin, end) : 0;
    add_scaled(own, has_zeros, inputs, left, right, to + token * kBlock);
  }
}

// Add to sums [M][kBlock] what rows of a stretch from `first` on add, whose codes are read next.
template <int M, typename Codes>
RAY_HETERO_INLINE void add_code_rows(const TokenTiles& x, ScalesAhead& scales,
                                     std::int64_t first, std::int64_t rows, Codes& codes,
                                     float* to) {
  const Groups& groups = scales.groups();
  // Each chain of sums waits for itself; those of two or more tokens are enough.
  constexpr int kChains = M == 1 ? 2 : 1;
  std::int64_t group = groups.at(first);
  for (std::int64_t row = first; row < first + rows; ++group) {
    const std::int64_t begin = row;
    const std::int64_t end = std::min(groups.end(group), first + rows);
    scales.prepare(group);
    Sums<M> sums[kChains];
    for (Sums<M>& chain : sums) chain.clear();
    while (row < end) {
      const std::uint16_t* pairs = x.at(row);
      const std::int64_t last = std::min(end, (row / kTile + 1) * kTile);
      for (; row < last; row += 2, pairs += 4) {
        prefetch_lines(codes.at(), Codes::kPairBytes);
        const TwoRows two = codes.next();
        add_row<M>(pairs, x.token, two.left[0], two.right[0], sums[0]);
        add_row<M>(pairs + 2, x.token, two.left[1], two.right[1], sums[kChains - 1]);
      }
    }
    add_chains<M>(x, scales, group, begin, end, sums, to);
  }
}

// Sums [M][kBlock] of M tokens, from codes as they lie in memory.
template <int M, typename Codes>
void sum_code_rows(const TokenTiles& x, const Stretch& stretch, float* sums) {
  clear(sums, M);
  ScalesAhead scales(stretch);
  Codes codes(stretch);
  add_code_rows<M>(x, scales, 0, stretch.rows, codes, sums);
}

// What some expanded rows of a stretch from `first` on add to sums [M][kBlock].
template <int M>
void add_expanded_codes(const TokenTiles& x, ScalesAhead& scales, std::int64_t first,
                        std::int64_t rows, const std::uint16_t* expanded, float* sums) {
  ExpandedCodes codes(expanded);
  add_code_rows<M>(x, scales, first, rows, codes, sums);
}

using AddExpandedCodes = void (*)(const TokenTiles&, ScalesAhead&, std::int64_t, std::int64_t,
                                  const std::uint16_t*, float*);
template <int... kLess>
constexpr std::array<AddExpandedCodes, kGroup> add_expanded_codes_of(
    std::integer_sequence<int, kLess...>) {
  return {add_expanded_codes<kLess + 1>...};
}
constexpr std::array<AddExpandedCodes, kGroup> kAddExpandedCodes =
    add_expanded_codes_of(std::make_integer_sequence<int, kGroup>());

template <typename Rows>
RAY_HETERO_INLINE void expand_rows(Rows& rows, std::int64_t count, std::uint16_t* to) {
  for (std::int64_t row = 0; row < count; row += 2, to += 2 * kRow) {
    const TwoRows two = rows.next();
    for (int one = 0; one < 2; ++one) {
      store_pairs(to + one * kRow, two.left[one]);
      store_pairs(to + one * kRow + kBlock, two.right[one]);
    }
  }
}

// Sums [m][kBlock] of tokens of which there are more than a pass over the codes takes.
template <typename Codes>
void sum_expanded_codes(const TokenTiles& x, std::int64_t m, const Stretch& stretch,
                        float* sums) {
  clear(sums, m);
  ScalesAhead scales(stretch);
  Codes codes(stretch);
  std::uint16_t* room = scratch_bf16(kExpandedRows * kRow, kExpanded);
  for (std::int64_t row = 0; row < stretch.rows; row += kExpandedRows) {
    const std::int64_t rows = std::min(kExpandedRows, stretch.rows - row);
    for (std::int64_t at = 0; at < rows; at += 2) {
      prefetch_lines(codes.at(), Codes::kPairBytes);
      expand_rows(codes, 2, room + at * kRow);
    }
    for (std::int64_t token = 0; token < m; token += kGroup) {
      kAddExpandedCodes[std::min<std::int64_t>(kGroup, m - token) - 1](
          x.from_token(token), scales, row, rows, room, sums + token * kBlock);
    }
  }
}

// ---- in float32 ---------------------------------------------------------------------------------

#if RAY_HETERO_HAS_TILES
// Processors with tiles take four operations for VDPBF16PS, which has two products of each lane, one
// for a product in float32, and one for looking up a code of four bits as a float: so few tokens,
// whose inputs are floats already, are multiplied in float32.

// Sums [M][kBlock] of M tokens: each chain of sums in the order of add_code_rows, the second of a
// pair first as VDPBF16PS has it, so that one token's have the same bits.  A lane of 32 bits holds an
// output's inputs of two rows in nibbles 0, 4, 2 and 6, those of the output 16 behind it in nibbles
// 1, 5, 3 and 7 (formats/int4.h).  Lanes are read again 1 to 3 bytes further in the place of being
// shifted: look-ups and products take the ports that shifts do.  Behind the last row are scales.
template <int M, typename Codes>
void sum_float_rows(const TokenTiles& x, const Stretch& stretch, float* sums) {
  constexpr int kChains = M == 1 ? 2 : 1;
  const Floats table = load_bf16(Codes::kTable);
  clear(sums, M);
  ScalesAhead scales(stretch);
  const Groups& groups = scales.groups();
  const std::uint8_t* at = stretch.data;
  std::int64_t group = groups.at(0);
  for (std::int64_t row = 0; row < stretch.rows; ++group) {
    const std::int64_t begin = row, end = std::min(groups.end(group), stretch.rows);
    scales.prepare(group);
    Sums<M> chains[kChains];
    for (Sums<M>& chain : chains) chain.clear();
    for (; row < end; row += 2, at += Codes::kPairBytes) {
      prefetch_lines(at, Codes::kPairBytes);
      for (int one = 0; one < 2; ++one) {
        Sums<M>& sum = chains[one * (kChains - 1)];
        const float* inputs = x.floats + 2 * (row + one);
        for (int which = 1; which >= 0; --which) {
          const Pairs lanes = load_pairs(at + 2 * which + one);
          const Floats left = looked_up_floats<0>(table, lanes);
          const Floats right = looked_up_floats<4>(table, lanes);
          for (int i = 0; i < M; ++i) {
            const Floats input = spread(inputs[i * x.inputs + which]);
            sum.left[i] = times_plus(left, input, sum.left[i]);
            sum.right[i] = times_plus(right, input, sum.right[i]);
          }
        }
      }
    }
    add_chains<M>(x, scales, group, begin, end, chains, sums);
  }
}
#endif

// ---- with tiles ---------------------------------------------------------------------------------

// Sums [m][kBlock] of up to 32 tokens; tiles have rows of one group only.
template <bool kTwo, typename Codes>
void sum_code_tiles(const TokenTiles& x, std::int64_t m, const Stretch& stretch, float* sums) {
  clear(sums, m);
  ScalesAhead scales(stretch);
  const Groups& groups = scales.groups();
  const bool has_zeros = groups.encoding().has_zeros();
  float* group_sums = scratch(2 * m * kBlock, kGroupSums);
  const auto add = [&](std::int64_t group, std::int64_t begin, std::int64_t end) {
    scales.prepare(group);
    const GroupScales own = scales.at(group);
    const float* from = group_sums + group % 2 * m * kBlock;
    if (has_zeros) {
      for (std::int64_t token = 0; token < m; ++token, from += kBlock) {
        const float inputs = sum_of_inputs(x, groups, group, token, begin, end);
        add_scaled(own, true, inputs, load_floats(from), load_floats(from + kLanes),
                   sums + token * kBlock);
      }
    } else {
      // Two operations and their loads and stores for each token: without a question between them.
      for (std::int64_t at = 0; at < m * kBlock; at += kBlock) {
        add_scaled(own, false, 0, load_floats(from + at), load_floats(from + at + kLanes), sums + at);
      }
    }
  };
  std::uint16_t* ring = scratch_bf16(kCodesRing * kTile * kRow, kExpanded);
  const auto slot = [&](std::int64_t tile) { return ring + tile % kCodesRing * kTile * kRow; };
  Codes codes(stretch);
  const std::int64_t tiles = stretch.rows / kTile;
  std::int64_t ahead = 0;  // tile that is expanded next
  const auto expand_up_to = [&](std::int64_t tile) {
    for (; ahead < std::min(tiles, tile); ++ahead) {
      if constexpr (Codes::kPairBytes > kLineBytes) {
        prefetch_lines(codes.at(), kTile / 2 * Codes::kPairBytes);
        expand_rows(codes, kTile, slot(ahead));
      } else {
        // Of codes of four bits 6 to 8 % faster than with lines fetched into the first-level cache too.
        for (std::int64_t row = 0; row < kTile; row += 2) {
          prefetch_l2(codes.at() + kPrefetchL2Bytes);
          expand_rows(codes, 2, slot(ahead) + row * kRow);
        }
      }
    }
  };
  if constexpr (!kTwo) {
    // Of up to 16 tokens, operands are loaded a tile before their products.
    expand_up_to(kCodesAhead);
    load_operands<0>(x.data, slot(0));
  }
  // A group's sums are still on their way to the cache when they have left the tiles: they are added
  // when the next group is there.
  std::int64_t before = -1, before_begin = 0, before_end = 0;
  std::int64_t group = groups.at(0);
  for (std::int64_t tile = 0; tile < tiles; ++group) {
    const std::int64_t begin = tile * kTile;
    const std::int64_t end = std::min(groups.end(group), stretch.rows);
    clear_sums<kTwo>();
    for (; tile * kTile < end; ++tile) {
      if constexpr (kTwo) {
        expand_up_to(tile + kCodesAhead + 1);
        multiply<true>(x.data + tile * x.tile, slot(tile));
      } else {
        const std::int64_t next = std::min(tile + 1, tiles - 1);
        const std::uint16_t* next_x = x.data + next * x.tile;
        if (tile % 2 == 0) {
          multiply_and_load<0>(next_x, slot(next));
        } else {
          multiply_and_load<1>(next_x, slot(next));
        }
        prefetch_tokens(x.data + (tile + 1 + kTokensAhead) * x.tile, m);
        expand_up_to(tile + kCodesAhead + 1);
      }
    }
    store_sums<kTwo>(group_sums + group % 2 * m * kBlock);
    if (before >= 0) add(before, before_begin, before_end);
    before = group, before_begin = begin, before_end = end;
  }
  add(before, before_begin, before_end);
}

// ---- by format ----------------------------------------------------------------------------------

// How up to 32 tokens are multiplied with a format's codes.
struct CodeKernels {
  using Sum = void (*)(const TokenTiles&, const Stretch&, float*);
  using SumOfTokens = void (*)(const TokenTiles&, std::int64_t, const Stretch&, float*);
  Sum sum[kGroup];               // for one token and more
  SumOfTokens sum_expanded;      // for more than these
  SumOfTokens sum_tiles[2];      // for one tile of tokens and two; where there are tiles
  Sum sum_floats[kFloatTokens];  // for tokens whose inputs are floats; or nullptr
};

#if RAY_HETERO_HAS_TILES
template <typename Codes, int... kLess>
constexpr void set_float_kernels(CodeKernels& kernels, std::integer_sequence<int, kLess...>) {
  ((kernels.sum_floats[kLess] = sum_float_rows<kLess + 1, Codes>), ...);
}
#endif

template <typename Codes, int... kLess>
constexpr CodeKernels code_kernels(std::integer_sequence<int, kLess...>) {
  CodeKernels kernels{{sum_code_rows<kLess + 1, Codes>...}, sum_expanded_codes<Codes>, {}, {}};
#if RAY_HETERO_HAS_TILES
  kernels.sum_tiles[0] = sum_code_tiles<false, Codes>;
  kernels.sum_tiles[1] = sum_code_tiles<true, Codes>;
  if constexpr (Codes::kTable != nullptr) {
    set_float_kernels<Codes>(kernels, std::make_integer_sequence<int, kFloatTokens>());
  }
#endif
  return kernels;
}

// Whether that many tokens are multiplied with codes as they are; else with scaled ones.
inline bool is_for_codes(std::int64_t m, const Stretch& stretch) {
  return m <= (kHasTiles ? kTokensBesideTiles : kTokensOfShortGroups) ||
         Groups(stretch).are_tiles();
}

// Sums [m][kBlock] of up to 32 tokens.
inline void sum_codes(const CodeKernels& kernels, const TokenTiles& x, std::int64_t m,
                      const Stretch& stretch, float* sums) {
  if (x.floats != nullptr) {
    kernels.sum_floats[m - 1](x, stretch, sums);
  } else if (kHasTiles && m > kDirectTokens && Groups(stretch).are_tiles()) {
    kernels.sum_tiles[m > kTile](x, m, stretch, sums);
  } else if (m <= kGroup) {
    kernels.sum[m - 1](x, stretch, sums);
  } else {
    kernels.sum_expanded(x, m, stretch, sums);
  }
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

// Products of tokens with rows of a weight: in bf16, of a format, of a format's codes, and what
// outliers add to them.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "codes.h"
#include "formats/all.h"
#include "scratch.h"
#include "sums.h"
#include "tiles.h"
#include "weight.h"
#include "widened.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

RAY_HETERO_INLINE void store_token(const Task& task, std::int64_t token, std::int64_t block,
                                   const float* sums) {
  for (int half = 0; half < kBlock; half += kLanes) {
    const std::int64_t at = block * kBlock + half;
    Floats sum = load_floats(sums + half);
    if (task.bias != nullptr) {
      sum = plus(sum, load_floats(task.bias + task.w.stored(block) * kBlock + half));
    }
    if (task.partial != nullptr) {
      store_floats(task.partial + token * task.w.n() + at, sum);
    } else {
      store_bf16(task.y_of(token) + at, sum);
    }
  }
}

// ---- rows in bf16 -------------------------------------------------------------------------------

// Lines that are read ahead while rows are multiplied, some every 16 rows: a burst of them would take
// all fill buffers of the first-level cache, and what is multiplied would wait for memory too.
struct LinesAhead {
  const std::uint8_t* next = nullptr;
  std::int64_t lines = 0;  // every 16 rows

  RAY_HETERO_PREFETCH void fetch() {
    for (std::int64_t line = 0; line < lines; ++line, next += kLineBytes) prefetch_l2(next);
  }
};

// Sums [M][kBlock] of M tokens plus what some rows in bf16 add to them.
template <int M>
void add_rows(const std::uint16_t* x, std::int64_t stride, const std::uint16_t* w,
              std::int64_t rows, bool is_first, LinesAhead ahead, float* to) {
  Sums<M> sums;
  if (is_first) {
    sums.clear();
  } else {
    sums.load(to, kBlock);
  }
  for (std::int64_t row = 0; row < rows;) {
    ahead.fetch();
    for (const std::int64_t end = std::min(row + kTile, rows); row < end; ++row, x += 2, w += kRow) {
      add_row<M>(x, stride, load_pairs(w), load_pairs(w + kBlock), sums);
    }
  }
  sums.store(to, kBlock);
}

using AddRows = void (*)(const std::uint16_t*, std::int64_t, const std::uint16_t*, std::int64_t,
                         bool, LinesAhead, float*);
template <int... kLess>
constexpr std::array<AddRows, kGroup> add_rows_of(std::integer_sequence<int, kLess...>) {
  return {add_rows<kLess + 1>...};
}
constexpr std::array<AddRows, kGroup> kAddRows =
    add_rows_of(std::make_integer_sequence<int, kGroup>());

// ---- rows of a format ---------------------------------------------------------------------------

// Sums [M][kBlock] of M tokens, whose pairs for these rows begin at x.
template <int M, typename Rows>
void sum_rows(const std::uint16_t* x, std::int64_t stride, const Stretch& stretch, float* to) {
  Sums<M> sums;
  sums.clear();
  Rows rows(stretch);
  for (std::int64_t row = 0; row < stretch.rows; row += 2, x += 4) {
    prefetch_lines(rows.at(), Rows::kPairBytes);
    const TwoRows two = rows.next();
    add_row<M>(x, stride, two.left[0], two.right[0], sums);
    add_row<M>(x + 2, stride, two.left[1], two.right[1], sums);
  }
  sums.store(to, kBlock);
}

// Rows in bf16; those that are not lie in `room` then.
template <typename Rows>
const std::uint16_t* expanded(const Stretch& stretch, std::uint16_t* room) {
  if constexpr (Rows::kIsExpanded) {
    return reinterpret_cast<const std::uint16_t*>(stretch.data);
  } else {
    Rows rows(stretch);
    expand_rows(rows, stretch.rows, room);
    return room;
  }
}

// Sums of up to 32 tokens, whose tiles for these rows begin at x, `step` elements apart.
template <bool kTwo, typename Rows>
void sum_tiles(const std::uint16_t* x, std::int64_t step, const Stretch& stretch, float* sums) {
  clear_sums<kTwo>();
  const std::int64_t tiles = stretch.rows / kTile;
  if constexpr (Rows::kIsExpanded) {
    const std::uint8_t* w = stretch.data;
    for (std::int64_t tile = 0; tile < tiles; ++tile, x += step, w += kTile * kRowBytes) {
      prefetch_lines(w, kTile * kRowBytes);
      multiply<kTwo>(x, reinterpret_cast<const std::uint16_t*>(w));
    }
  } else {
    // A tile cannot be loaded from stores that are still on their way to the cache, so the next
    // tiles are expanded while this one is multiplied.
    std::uint16_t* ring = scratch_bf16(kRing * kTile * kRow, kExpanded);
    // Others may lie between the tiles of these tokens.
    const auto tokens = std::min<std::int64_t>(step / (2 * kTile), kTile);
    Rows rows(stretch);
    for (std::int64_t tile = -kAhead; tile < tiles; ++tile) {
      if (tile + kAhead < tiles) {
        prefetch_lines(rows.at(), kTile / 2 * Rows::kPairBytes);
        expand_rows(rows, kTile, ring + (tile + kAhead) % kRing * kTile * kRow);
      }
      if (tile < 0) continue;
      // Of two tiles of tokens, these requests would delay more than they save.
      if constexpr (!kTwo) prefetch_tokens(x + (tile + kTokensAhead) * step, tokens);
      multiply<kTwo>(x + tile * step, ring + tile % kRing * kTile * kRow);
    }
  }
  store_sums<kTwo>(sums);
}

// Sums [m][kBlock] of tokens, of rows that are expanded for all of them.
template <typename Rows>
void sum_expanded(const TokenTiles& x, std::int64_t m, const Stretch& stretch, float* sums) {
  std::uint16_t* room = scratch_bf16(kExpandedRows * kRow, kExpanded);
  Rows rows(stretch);
  for (std::int64_t row = 0; row < stretch.rows; row += kExpandedRows) {
    const std::int64_t count = std::min(kExpandedRows, stretch.rows - row);
    for (std::int64_t at = 0; at < count; at += 2) {
      prefetch_lines(rows.at(), Rows::kPairBytes);
      expand_rows(rows, 2, room + at * kRow);
    }
    for (std::int64_t token = 0; token < m; token += kGroup) {
      kAddRows[std::min<std::int64_t>(kGroup, m - token) - 1](
          x.at(row) + token * x.token, x.token, room, count, row == 0, {}, sums + token * kBlock);
    }
  }
}

// What a format's rows are computed with.
struct RowKernels {
  using SumRows = void (*)(const std::uint16_t*, std::int64_t, const Stretch&, float*);
  SumRows sum[kGroup];   // for one token and more; where there are neither tiles nor codes
  SumRows sum_tiles[2];  // for one tile of tokens and two; where there are tiles
  CodeKernels::SumOfTokens sum_expanded;  // of scaled codes; where there are no tiles
  const std::uint16_t* (*expanded)(const Stretch&, std::uint16_t*);
  bool has_codes;
  CodeKernels codes;  // if it has
};

template <typename Rows, int... kLess>
constexpr RowKernels row_kernels(std::integer_sequence<int, kLess...> less) {
  RowKernels kernels{{}, {}, nullptr, expanded<Rows>, Rows::kHasCodes, {}};
  if constexpr (Rows::kHasCodes) kernels.codes = code_kernels<typename Rows::Codes>(less);
  if constexpr (kHasTiles) {
    kernels.sum_tiles[0] = sum_tiles<false, Rows>;
    kernels.sum_tiles[1] = sum_tiles<true, Rows>;
  } else if constexpr (Rows::kHasCodes) {
    kernels.sum_expanded = sum_expanded<Rows>;
  } else {
    const typename RowKernels::SumRows sum[] = {sum_rows<kLess + 1, Rows>...};
    for (int i = 0; i < kGroup; ++i) kernels.sum[i] = sum[i];
  }
  return kernels;
}

#define RAY_HETERO_FORMAT(name) row_kernels<name##Rows>(std::make_integer_sequence<int, kGroup>()),
constexpr RowKernels kRowKernels[] = {RAY_HETERO_FORMATS(RAY_HETERO_FORMAT)};
#undef RAY_HETERO_FORMAT

inline const RowKernels& kernels_of(const Stretch& stretch) {
  return kRowKernels[static_cast<int>(stretch.format)];
}

// A thread's own memory for such sums.
inline void reserve_few(std::int64_t m) {
  constexpr std::int64_t kRows = kHasTiles ? std::max(kRing, kCodesRing) * kTile : kExpandedRows;
  scratch_bf16(kRows * kRow, kExpanded);
  if constexpr (kHasTiles) scratch(2 * m * kBlock, kGroupSums);
  ScalesAhead::reserve();
}

// The encoding of a weight whose groups have zero points, or nullptr.
inline const Scaled* with_zeros(const Weight& w) {
  const bool has_codes = kernels_of(w.stretch(0, 0, 2)).has_codes;
  const auto* scaled = has_codes ? static_cast<const Scaled*>(w.encoding) : nullptr;
  return scaled != nullptr && scaled->has_zeros() ? scaled : nullptr;
}

// Whether so many tokens' inputs are to be floats for a weight.
inline bool wants_floats(const Weight& w, std::int64_t m) {
  const RowKernels& kernels = kernels_of(w.stretch(0, 0, 2));
  return kernels.has_codes && m <= kFloatTokens && kernels.codes.sum_floats[0] != nullptr;
}

// Sums [m][kBlock] of up to 32 tokens, whose tiles are set up where there are any.
inline void sum_few(const TokenTiles& x, std::int64_t m, const Stretch& stretch, float* sums) {
  const RowKernels& kernels = kernels_of(stretch);
  if (kernels.has_codes && is_for_codes(m, stretch)) {
    sum_codes(kernels.codes, x, m, stretch, sums);
  } else if constexpr (kHasTiles) {
    kernels.sum_tiles[m > kTile](x.data, x.tile, stretch, sums);
  } else if (kernels.has_codes) {
    kernels.sum_expanded(x, m, stretch, sums);
  } else if (kIsHalf && m >= kWideTokens) {
    const auto* rows = reinterpret_cast<const std::uint16_t*>(stretch.data);
    add_widened(x.data, x.token, m, rows, stretch.rows, true, sums);
  } else {
    for (std::int64_t token = 0; token < m; token += kGroup) {
      const auto group = std::min<std::int64_t>(kGroup, m - token);
      kernels.sum[group - 1](x.data + token * x.token, x.token, stretch, sums + token * kBlock);
    }
  }
}

// What outliers of one output add to the sums [tokens][kBlock] of tokens from `begin` on.
inline void add_outliers_of_output(const Task& task, const Outliers& outliers, std::int64_t begin,
                                   std::int64_t tokens, float* sums) {
  const Places places = task.places();
  const std::int64_t step = places.at(1, 0) - places.at(0, 0);
  for (std::int64_t token = 0; token < tokens; token += kLanes) {
    Floats sum = zeros();
    for (const Outlier& one : outliers) {
      const std::uint16_t* pairs = task.x + places.at(begin + token, one.k & ~1u);
      const Floats x = gathered(pairs, one.k % 2 != 0, step, tokens - token);
      sum = times_plus(spread(as_float(one.value)), x, sum);
    }
    float added[kLanes];
    store_floats(added, sum);
    for (std::int64_t i = 0; i < std::min<std::int64_t>(kLanes, tokens - token); ++i) {
      sums[(token + i) * kBlock] += added[i];
    }
  }
}

// What a block's outliers add to the sums [tokens][kBlock] of tokens from `begin` on.
inline void add_outliers(const Task& task, std::int64_t block, std::int64_t begin,
                         std::int64_t tokens, float* sums) {
  const Outliers all = task.w.outliers(block);
  if (tokens <= kScalarTokens) {
    const Places places = task.places();
    for (const Outlier& one : all) {
      for (std::int64_t token = 0; token < tokens; ++token) {
        const float x = as_float(task.x[places.at(begin + token, one.k)]);
        sums[token * kBlock + one.output] += as_float(one.value) * x;
      }
    }
    return;
  }
  // Those of an output are neighbours.
  for (const Outlier *first = all.begin(), *last = first; first != all.end(); first = last) {
    while (last != all.end() && last->output == first->output) ++last;
    add_outliers_of_output(task, {first, last}, begin, tokens, sums + first->output);
  }
}

// A stretch's rows in bf16 with their outliers, in `room` unless they lie in memory so.
inline const std::uint16_t* expanded(const Stretch& stretch, const Outliers& outliers,
                                     std::uint16_t* room) {
  const std::uint16_t* rows = kernels_of(stretch).expanded(stretch, room);
  for (const Outlier& one : outliers) {
    room[(one.k / 2 - stretch.first) * kRow + 2 * one.output + one.k % 2] = one.value;
  }
  return rows;
}

// The packed rows of a weight.
inline void expand(const Weight& weight, std::uint16_t* packed) {
#pragma omp parallel
  {
    const DenormalsAreZero mode;
#pragma omp for schedule(static)
    for (std::int64_t block = 0; block < weight.blocks(); ++block) {
      const std::int64_t elements = weight.pairs() * kRow;
      std::uint16_t* to = packed + block * elements;
      const Stretch stretch = weight.stretch(block, 0, weight.pairs());
      const std::uint16_t* from = expanded(stretch, weight.outliers(block), to);
      if (from != to) std::memcpy(to, from, elements * sizeof(std::uint16_t));
    }
  }
}

// x [m][stride] as tiles [k / 32][m][32], so that the rows of a tile are neighbours.
inline void pack_tokens(const Task& task, std::int64_t begin, std::int64_t end,
                        std::uint16_t* packed) {
  const Places rows = task.places(), tiles{task.m, task.w.k(), true};
  for (std::int64_t token = 0; token < task.m; ++token) {
    for (std::int64_t at = begin * 2 * kTile; at < end * 2 * kTile; at += 2 * kTile) {
      store_pairs(packed + tiles.at(token, at), load_pairs(task.x + rows.at(token, at)));
    }
  }
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

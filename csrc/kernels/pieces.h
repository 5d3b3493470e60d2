// Pieces of a weight, neighbouring rows of a block, that become bf16 once for all tokens: those of a
// prompt, or of a decode step of more tokens than tiles take at once.
//
// A piece stays in the first-level cache while groups of tokens are multiplied with it, and what comes
// behind it is read meanwhile.  Rounding is the same for any number of tokens: weights are bf16, those
// of codes scaled and rounded, and outliers are in their places.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "row_products.h"
#include "sizes.h"
#include "tiles.h"
#include "weight.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

// Most rows of one, which many tokens use before the next rows are read.  With tiles, twice as many
// leave no room in a first-level cache for the tokens that pass through it: 64 tokens take 1.3 times
// as long.
constexpr std::int64_t kPieceRows = kHasTiles ? 64 : 128;

// Rows of a block in bf16.
struct Piece {
  const std::uint16_t* data;
  std::int64_t rows;
  // Memory that is read next, for the second-level cache.
  const std::uint8_t* next;
  std::int64_t next_bytes;
};

// A piece with its outliers, in this thread's memory unless it lies in bf16 already; behind it the
// same block's next rows are read.
inline Piece piece_of(const Weight& w, std::int64_t block, std::int64_t row, std::int64_t rows) {
  const Stretch stretch = w.stretch(block, row, rows);
  std::uint16_t* room = scratch_bf16(kPieceRows * kRow, kExpanded);
  const std::int64_t bytes = rows / 2 * stretch.pair_bytes;
  return {expanded(stretch, w.outliers_of_rows(block, row, rows), room), rows,
          stretch.data + bytes, bytes};
}

// Sums [tokens][kBlock] plus what `rows` rows in bf16 add to them, for up to 32 tokens whose tiles
// begin at x, `step` elements apart; meanwhile `lines` lines a tile are read ahead from `next` on.
template <bool kTwo>
void add_group(const std::uint16_t* x, std::int64_t step, const std::uint16_t* w,
               std::int64_t rows, bool is_first, const std::uint8_t* next, std::int64_t lines,
               float* sums) {
  if (is_first) {
    clear_sums<kTwo>();
  } else {
    load_sums<kTwo>(sums);
  }
  for (std::int64_t row = 0; row < rows; row += kTile, x += step) {
    for (std::int64_t line = 0; line < lines; ++line, next += kLineBytes) prefetch_l2(next);
    multiply<kTwo>(x, w + row * kRow);
  }
  store_sums<kTwo>(sums);
}

// Sums [tokens][kBlock] plus what a piece adds to them, for any number of tokens, whose pairs for its
// rows begin at x.
inline void add_piece(const TokenTiles& x, std::int64_t tokens, const Piece& piece, bool is_first,
                      TileSetUp& set_up, float* sums) {
  if constexpr (kIsHalf) {
    return add_widened(x.data, x.token, tokens, piece.data, piece.rows, is_first, sums);
  }
  constexpr std::int64_t kGroupTokens = kHasTiles ? kFewTokens : kGroup;
  const std::int64_t groups = (tokens + kGroupTokens - 1) / kGroupTokens;
  const std::int64_t turns = groups * (piece.rows / kTile);
  const std::int64_t lines = (piece.next_bytes / kLineBytes + turns - 1) / turns;
  const std::uint8_t* next = piece.next;
  for (std::int64_t token = 0; token < tokens; token += kGroupTokens, sums += kGroupTokens * kBlock) {
    const std::int64_t here = std::min<std::int64_t>(kGroupTokens, tokens - token);
    const std::uint16_t* from = x.data + token * x.token;
    if constexpr (kHasTiles) {
      set_up.for_tokens(here);
      (here > kTile ? add_group<true> : add_group<false>)(from, x.tile, piece.data, piece.rows,
                                                          is_first, next, lines, sums);
    } else {
      kAddRows[here - 1](from, x.token, piece.data, piece.rows, is_first, {next, lines}, sums);
    }
    next += piece.rows / kTile * lines * kLineBytes;
  }
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

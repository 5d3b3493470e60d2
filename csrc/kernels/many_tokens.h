// Products of a linear layer for many tokens, as prompts have them.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "denormals.h"
#include "layers.h"
#include "pieces.h"
#include "scratch.h"
#include "sizes.h"
#include "team.h"
#include "tiles.h"
#include "weight.h"
#include "work_queue.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

class ManyTokens {
 public:
  explicit ManyTokens(const Task& task)
      : task_(task),
        threads_(omp_get_max_threads()),
        groups_((task.m + kPieceTokens - 1) / kPieceTokens),
        tokens_((task.m / kTile / 2 + groups_) / groups_ * kTile * 2),
        wide_(std::clamp<std::int64_t>(task.w.blocks() * groups_ / (4 * threads_), 1,
                                       kPieceBlocks)),
        columns_((task.w.blocks() + wide_ - 1) / wide_),
        packed_(scratch_bf16(task.m * pieces() * kPieceInputs, kSharedTokens)),
        queue_(columns_ * groups_, threads_) {}

  void run() {
    Shortage shortage;
#pragma omp parallel num_threads(threads_)
    {
      const DenormalsAreZero mode;
      const bool has = shortage.has([this] {
        scratch_bf16(kPieceRows * kRow, kExpanded);
        scratch(wide_ * tokens_ * kBlock, kSums);
      });
      if constexpr (kHasTiles) {
#pragma omp for schedule(static)
        for (std::int64_t tile = 0; tile < task_.w.pairs() / kTile; ++tile) {
          pack_tokens(task_, tile, tile + 1, packed_);
        }
      } else {
#pragma omp for schedule(static)
        for (std::int64_t token = 0; token < task_.m; ++token) pack(token);
      }
      const int thread = omp_get_thread_num();
      TileSetUp set_up;
      // Other threads take the units of one that has no memory.
      for (Units units; has && (units = queue_.next(thread)).count > 0;) sum(units.first, set_up);
      if constexpr (kHasTiles) release_tiles();
    }
    shortage.raise();
  }

 private:
  static constexpr std::int64_t kPieceInputs = 2 * kPieceRows;

  std::int64_t pieces() const { return (task_.w.pairs() + kPieceRows - 1) / kPieceRows; }

  // Have a token's inputs for a piece lie behind those of the token before.  From token to token of x
  // there are often multiples of 4 KiB, whose lines take each other's places in a cache, and more
  // pages than a processor keeps at hand.
  void pack(std::int64_t token) {
    const std::uint16_t* from = task_.x + token * task_.stride;
    std::uint16_t* to = packed_ + token * kPieceInputs;
    for (std::int64_t at = 0; at < task_.w.k(); at += kPieceInputs, to += task_.m * kPieceInputs) {
      std::memcpy(to, from + at, std::min(kPieceInputs, task_.w.k() - at) * sizeof(*to));
    }
  }

  // From a token on.
  TokenTiles packed(std::int64_t token) const {
    const TokenTiles all{packed_, kHasTiles ? 2 * kTile : kPieceInputs, task_.m * 2 * kTile};
    return all.from_token(token);
  }

  void sum(std::int64_t unit, TileSetUp& set_up) {
    const std::int64_t first = unit / groups_ * wide_;
    const std::int64_t last = std::min(first + wide_, task_.w.blocks());
    const std::int64_t begin = unit % groups_ * tokens_;
    const std::int64_t end = std::min(begin + tokens_, task_.m);
    const std::int64_t tokens = end - begin;
    if (tokens <= 0) return;
    const TokenTiles x = packed(begin);
    float* sums = scratch((last - first) * tokens * kBlock, kSums);
    for (std::int64_t row = 0; row < task_.w.pairs(); row += kPieceRows) {
      const std::int64_t rows = std::min(kPieceRows, task_.w.pairs() - row);
      for (std::int64_t block = first; block < last; ++block) {
        add_piece(x.from_row(row), tokens, piece_of(task_.w, block, row, rows), row == 0, set_up,
                  sums + (block - first) * tokens * kBlock);
      }
    }
    for (std::int64_t block = first; block < last; ++block) {
      for (std::int64_t token = 0; token < tokens; ++token, sums += kBlock) {
        store_token(task_, begin + token, block, sums);
      }
    }
  }

  const Task& task_;
  const int threads_;
  const std::int64_t groups_, tokens_;  // groups of tokens, and tokens of each
  const std::int64_t wide_, columns_;   // blocks of a unit, and units of a group
  std::uint16_t* packed_;  // [k / 32][m][32], or of pieces [k / 256][m][256]
  WorkQueue queue_;
};

}  // namespace ray_hetero::RAY_HETERO_LEVEL

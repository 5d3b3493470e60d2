// Products of a linear layer for the tokens of a decode step.
//
// Up to 32 tokens are multiplied with weights as these are stored, which are read once.  Of more
// tokens, up to 128, a piece of a weight's rows becomes bf16 once, and is multiplied with groups of 32
// (pieces.h).  These read their inputs from the second-level cache: so a unit has as many rows as
// inputs fit there, and where that is not a whole block, a thread's units are neighbouring blocks with
// the same inputs.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "denormals.h"
#include "layers.h"
#include "pieces.h"
#include "row_products.h"
#include "scratch.h"
#include "sizes.h"
#include "team.h"
#include "tiles.h"
#include "weight.h"
#include "work_queue.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

// How the blocks of a weight are cut into units.
struct UnitShape {
  std::int64_t parts, rows;  // units of a block, and rows of each

  UnitShape(const Weight& w, std::int64_t m) {
    const std::int64_t row_bytes = 2 * sizeof(std::uint16_t) * m;  // of inputs, two for each token
    const std::int64_t most =
        m > kFewTokens ? kStepInputBytes / row_bytes / kTile * kTile : kUnitRows;
    parts = (w.pairs() + most - 1) / most;
    rows = (w.pairs() / kTile + parts - 1) / parts * kTile;
  }
};

class FewTokens {
 public:
  explicit FewTokens(const Task& task)
      : task_(task),
        expands_(task.m > kFewTokens),
        shape_(task.w, task.m),
        threads_(omp_get_max_threads()),
        queue_(task.w.blocks() * shape_.parts, threads_),
        zeros_(expands_ ? nullptr : with_zeros(task.w)),
        missing_(new std::atomic<int>[task.w.blocks()]),
        sums_(reserve(task.w, task.m)) {
    for (std::int64_t block = 0; block < task.w.blocks(); ++block) {
      missing_[block].store(static_cast<int>(shape_.parts), std::memory_order_relaxed);
    }
  }

  void run() {
    Shortage shortage;
#pragma omp parallel num_threads(threads_)
    {
      const DenormalsAreZero mode;
      // Other threads take the units of one that has no memory.
      const bool has = shortage.has([this] { reserve_own(task_); });
      if (has) work(omp_get_thread_num());
    }
    shortage.raise();
  }

  // Memory for the sums; products that share it have to reserve it before the first one begins.
  static float* reserve(const Weight& w, std::int64_t m) {
    const std::int64_t parts = UnitShape(w, m).parts;
    if (parts == 1) return nullptr;  // sums of whole blocks stay with their threads
    return scratch(static_cast<std::size_t>(w.blocks() * parts * m * kBlock), kSums);
  }

  // A thread's own memory, which it has to have before it begins to work.
  static void reserve_own(const Task& task) {
    scratch(2 * task.m * kBlock, kOwnSums);
    if constexpr (kHasTiles) {
      if (!task.x_is_tiles) scratch_bf16(task.m * task.w.k(), kOwnTokens);
    }
    if (task.m > kFewTokens) {
      scratch_bf16(kPieceRows * kRow, kExpanded);
      return;
    }
    reserve_few(task.m);
    if (wants_floats(task.w, task.m)) scratch(task.m * task.w.k(), kFloats);
    if (const Scaled* scaled = with_zeros(task.w)) scratch(task.m * scaled->groups(), kInputSums);
  }

  // The first weights of this thread's share.
  ReadAhead ahead(int thread) const {
    const Units units = queue_.first(thread);
    if (units.count == 0) return {nullptr, 0};
    const Stretch stretch = stretch_of(unit(units.first));
    const bool are_neighbours = shape_.parts == 1 || !expands_;
    const std::int64_t rows = (are_neighbours ? units.count : 1) * shape_.rows;
    return {stretch.data, rows / 2 * stretch.pair_bytes};
  }

  // One thread's share of the work; all of the team's threads have to come.
  void work(int thread) {
    TokenTiles tokens = task_.places().tiles(task_.x, 0);
    if constexpr (kHasTiles) {
      if (!task_.x_is_tiles) tokens = Places{task_.m, task_.w.k(), true}.tiles(own_tiles(), 0);
    }
    if (zeros_ != nullptr) {
      float* sums = scratch(task_.m * zeros_->groups(), kInputSums);
      sum_groups(*zeros_, tokens, task_.m, sums);
      tokens.group_sums = sums, tokens.groups = zeros_->groups();
    }
    if (wants_floats(task_.w, task_.m)) {
      tokens.floats = own_floats(tokens), tokens.inputs = task_.w.k();
    }
    TileSetUp set_up;
    if (!expands_) set_up.for_tokens(task_.m);
    const std::int64_t together = expands_ ? 1 : shape_.parts;
    for (Units units; (units = queue_.next(thread, together)).count > 0;) {
      if (units.count == shape_.parts) {
        whole_block(unit(units.first).block, tokens, set_up);
      } else {
        one_part(unit(units.first), tokens, set_up);
      }
    }
    if constexpr (kHasTiles) release_tiles();
  }

 private:
  struct Unit {
    std::int64_t block, part;
  };

  // A block's parts are neighbours where its rows are read in one go, a part's blocks where they have
  // their inputs in common.
  Unit unit(std::int64_t number) const {
    if (!expands_) return {number / shape_.parts, number % shape_.parts};
    return {number % task_.w.blocks(), number / task_.w.blocks()};
  }

  Stretch stretch_of(const Unit& unit) const {
    const std::int64_t row = unit.part * shape_.rows;
    return task_.w.stretch(unit.block, row, std::min(shape_.rows, task_.w.pairs() - row));
  }

  // A copy for each thread: a shared one would have all of them wait until it is there.
  const std::uint16_t* own_tiles() const {
    std::uint16_t* tiles = scratch_bf16(task_.m * task_.w.k(), kOwnTokens);
    pack_tokens(task_, 0, task_.w.pairs() / kTile, tiles);
    return tiles;
  }

  // The same in float32, token by token.
  const float* own_floats(const TokenTiles& tokens) const {
    float* floats = scratch(task_.m * task_.w.k(), kFloats);
    for (std::int64_t token = 0; token < task_.m; ++token) {
      float* to = floats + token * task_.w.k();
      for (std::int64_t row = 0; row < task_.w.pairs(); row += kTile, to += 2 * kTile) {
        const std::uint16_t* from = tokens.at(row) + token * tokens.token;
        store_floats(to, load_bf16(from));
        store_floats(to + kLanes, load_bf16(from + kLanes));
      }
    }
    return floats;
  }

  // All parts of a block, whose sums stay with this thread.
  void whole_block(std::int64_t block, const TokenTiles& tokens, TileSetUp& set_up) {
    const std::int64_t floats = task_.m * kBlock;
    float* sums = scratch(2 * floats, kOwnSums);
    for (std::int64_t part = 0; part < shape_.parts; ++part) {
      float* to = part == 0 ? sums : sums + floats;
      sum({block, part}, tokens, set_up, to);
      if (part > 0) add(sums, to);
    }
    store(block, sums);
  }

  // One part; who computes the last of a block puts them together.
  void one_part(const Unit& unit, const TokenTiles& tokens, TileSetUp& set_up) {
    const std::int64_t floats = task_.m * kBlock;
    float* sums = sums_ + unit.block * shape_.parts * floats;
    sum(unit, tokens, set_up, sums + unit.part * floats);
    if (missing_[unit.block].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    for (std::int64_t part = 1; part < shape_.parts; ++part) add(sums, sums + part * floats);
    store(unit.block, sums);
  }

  void sum(const Unit& unit, const TokenTiles& tokens, TileSetUp& set_up, float* sums) const {
    const Stretch stretch = stretch_of(unit);
    if (expands_) {
      sum_pieces(unit, stretch, tokens, set_up, sums);
    } else {
      sum_few(tokens.from_row(stretch.first), task_.m, stretch, sums);
    }
  }

  void sum_pieces(const Unit& unit, const Stretch& stretch, const TokenTiles& tokens,
                  TileSetUp& set_up, float* sums) const {
    const std::int64_t end = stretch.first + stretch.rows;
    for (std::int64_t row = stretch.first; row < end; row += kPieceRows) {
      Piece piece = piece_of(task_.w, unit.block, row, std::min(kPieceRows, end - row));
      if (row + piece.rows == end) {
        // This thread's next unit, unless it was the last one.
        if (unit.block + 1 < task_.w.blocks()) {
          piece.next = stretch_of({unit.block + 1, unit.part}).data;
        } else {
          piece.next_bytes = 0;
        }
      }
      add_piece(tokens.from_row(row), task_.m, piece, row == stretch.first, set_up, sums);
    }
  }

  void add(float* sums, const float* more) const {
    for (std::int64_t at = 0; at < task_.m * kBlock; at += kLanes) {
      store_floats(sums + at, plus(load_floats(sums + at), load_floats(more + at)));
    }
  }

  void store(std::int64_t block, float* sums) const {
    // Pieces have theirs.
    if (!expands_) add_outliers(task_, block, 0, task_.m, sums);
    for (std::int64_t token = 0; token < task_.m; ++token, sums += kBlock) {
      store_token(task_, token, block, sums);
    }
  }

  const Task& task_;
  const bool expands_;  // whether rows become bf16 once for all tokens
  const UnitShape shape_;
  const int threads_;
  WorkQueue queue_;
  const Scaled* const zeros_;  // as with_zeros, where codes are multiplied
  std::unique_ptr<std::atomic<int>[]> missing_;  // units of each block that are not done
  float* sums_;  // [blocks][parts][m][kBlock]; nullptr where blocks are whole
};

}  // namespace ray_hetero::RAY_HETERO_LEVEL

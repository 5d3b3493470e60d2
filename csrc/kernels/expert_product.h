// One product of the experts that a step uses.
//
// Included once for each level, see levels.h.
//
// A product is cut into units, parts of blocks of 32 outputs, which threads take from one queue
// whatever the expert, so that all of them stream weights until the last unit.  Sums of a block's
// parts are added up one after the other, whichever thread took them.

#pragma once

#include "this_level.h"

#include "expert_tokens.h"
#include "layers.h"
#include "pieces.h"
#include "row_products.h"
#include "tiles.h"
#include "weight.h"
#include "work_queue.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

// Tokens whose products are summed from a weight's rows as these lie in memory.
constexpr std::int64_t kDirectExpertTokens = kHasTiles ? kFewTokens : kGroup;

// One of the two products of the experts that a step uses.
//
// Tokens(number) gives the ExpertTokens of an active expert, store(number, block, first, count,
// sums) takes sums [count][kBlock] of its tokens from `first` on.
template <typename Tokens, typename Store>
class ExpertProduct {
 public:
  ExpertProduct(const Experts& experts, Weight Expert::* which, const Routing& routing,
                const Tokens& tokens, const Store& store, Buffer shared)
      : experts_(experts), which_(which), routing_(routing), tokens_(tokens), store_(store),
        blocks_((experts.experts.front().*which).blocks()),
        pairs_((experts.experts.front().*which).pairs()),
        parts_(routing.most() > kFewTokens ? 1 : (pairs_ + kUnitRows - 1) / kUnitRows),
        rows_((pairs_ / kTile + parts_ - 1) / parts_ * kTile),
        threads_(omp_get_max_threads()),
        wide_(routing.most() <= kFewTokens
                  ? 1
                  : std::clamp<std::int64_t>(routing.active() * blocks_ / (8 * threads_), 1,
                                             kPieceBlocks)),
        columns_((blocks_ + wide_ - 1) / wide_),
        queue_(routing.active() * columns_ * parts_, threads_) {
    if (parts_ == 1) return;
    shared_ = scratch(routing.places() * blocks_ * parts_ * kBlock, shared);
    missing_.reset(new std::atomic<int>[routing.active() * blocks_]);
    for (std::int64_t block = 0; block < routing.active() * blocks_; ++block) {
      missing_[block].store(static_cast<int>(parts_), std::memory_order_relaxed);
    }
  }

  // The first weights of this thread's share.
  ReadAhead ahead(int thread) const {
    const Units units = queue_.first(thread);
    if (units.count == 0) return {nullptr, 0};
    const std::int64_t column = units.first / parts_, number = column / columns_;
    const std::int64_t block = column % columns_ * wide_, row = units.first % parts_ * rows_;
    const Stretch stretch = weight(number).stretch(block, row, 0);
    const std::int64_t left = (blocks_ - block) * pairs_ - row;
    const std::int64_t share = units.count * wide_ * rows_;
    return {stretch.data, std::min(left, share) / 2 * stretch.pair_bytes};
  }

  // A thread's own memory, which it has to have before it begins to work.
  void reserve_own() const {
    const std::int64_t few = 2 * std::min(routing_.most(), kFewTokens);
    const std::int64_t many = wide_ * std::min(routing_.most(), kPieceTokens);
    scratch(std::max(few, many) * kBlock, kOwnSums);
    scratch_bf16(kPieceRows * kRow, kExpanded);
    reserve_few(std::min(routing_.most(), kFewTokens));
  }

  // One thread's share of the work; all of the team's threads have to come.
  void work(int thread) {
    TileSetUp set_up;
    for (Units units; (units = queue_.next(thread, parts_)).count > 0;) {
      const std::int64_t column = units.first / parts_, number = column / columns_;
      const std::int64_t block = column % columns_ * wide_;
      if (units.count < parts_) {
        one_part(number, block, units.first % parts_, set_up);
      } else if (routing_.tokens(number) > kFewTokens) {
        many_tokens(number, block, std::min(block + wide_, blocks_), set_up);
      } else {
        for (std::int64_t one = block; one < std::min(block + wide_, blocks_); ++one) {
          whole_block(number, one, set_up);
        }
      }
    }
    if constexpr (kHasTiles) release_tiles();
  }

 private:
  const Weight& weight(std::int64_t number) const {
    return experts_.experts[routing_.expert(number)].*which_;
  }

  // All parts of a block of up to 32 tokens, whose sums stay with this thread.
  void whole_block(std::int64_t number, std::int64_t block, TileSetUp& set_up) const {
    const ExpertTokens x = tokens_(number);
    float* sums = scratch(2 * x.count * kBlock, kOwnSums);
    for (std::int64_t part = 0; part < parts_; ++part) {
      float* to = part == 0 ? sums : sums + x.count * kBlock;
      sum_part(number, x, block, part, set_up, to);
      if (part > 0) add(sums, to, x.count);
    }
    finish(number, x, block, sums);
  }

  // One part; who computes the last of a block puts them together.
  void one_part(std::int64_t number, std::int64_t block, std::int64_t part,
                TileSetUp& set_up) {
    const ExpertTokens x = tokens_(number);
    const std::int64_t floats = x.count * kBlock;
    float* parts = shared_ + (routing_.first(number) * blocks_ + block * x.count) * parts_ * kBlock;
    sum_part(number, x, block, part, set_up, parts + part * floats);
    std::atomic<int>& missing = missing_[number * blocks_ + block];
    if (missing.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    for (std::int64_t other = 1; other < parts_; ++other) {
      add(parts, parts + other * floats, x.count);
    }
    finish(number, x, block, parts);
  }

  void sum_part(std::int64_t number, const ExpertTokens& x, std::int64_t block, std::int64_t part,
                TileSetUp& set_up, float* sums) const {
    const std::int64_t row = part * rows_, rows = std::min(rows_, pairs_ - row);
    const Weight& w = weight(number);
    set_up.for_tokens(x.count);
    const Stretch stretch = w.stretch(block, row, rows);
    if (x.count > kDirectExpertTokens && !kernels_of(stretch).has_codes) {
      for (std::int64_t at = row; at < row + rows; at += kPieceRows) {
        // `finish` adds the outliers.
        add_piece(w, block, at, std::min(kPieceRows, row + rows - at), at == row, {}, x, 0, x.count,
                  set_up, sums);
      }
      return;
    }
    sum_few(x.places(0).tiles(x.data, row), x.count, stretch, sums);
  }

  // Neighbouring blocks of many tokens, some of these after the other: a piece of the tokens stays
  // in the second-level cache while a piece of each block is multiplied with it.
  void many_tokens(std::int64_t number, std::int64_t first, std::int64_t last,
                   TileSetUp& set_up) const {
    const ExpertTokens x = tokens_(number);
    const Weight& w = weight(number);
    for (std::int64_t begin = 0; begin < x.count; begin += kPieceTokens) {
      const std::int64_t tokens = std::min(kPieceTokens, x.count - begin);
      float* sums = scratch((last - first) * tokens * kBlock, kOwnSums);
      for (std::int64_t row = 0; row < pairs_; row += kPieceRows) {
        const std::int64_t rows = std::min(kPieceRows, pairs_ - row);
        for (std::int64_t block = first; block < last; ++block) {
          add_piece(w, block, row, rows, row == 0, w.outliers_of_rows(block, row, rows), x, begin,
                    tokens, set_up, sums + (block - first) * tokens * kBlock);
        }
      }
      for (std::int64_t block = first; block < last; ++block) {
        float* of_block = sums + (block - first) * tokens * kBlock;
        store_(number, block, begin, tokens, of_block);
      }
    }
  }

  // What some rows of a block add to sums of tokens from `begin` on, the first of a group.
  void add_piece(const Weight& w, std::int64_t block, std::int64_t row, std::int64_t rows,
                 bool is_first, const Outliers& outliers, const ExpertTokens& x, std::int64_t begin,
                 std::int64_t tokens, TileSetUp& set_up, float* sums) const {
    const Stretch stretch = w.stretch(block, row, rows);
    std::uint16_t* room = scratch_bf16(kPieceRows * kRow, kExpanded);
    const std::uint16_t* in_bf16 = expanded(stretch, outliers, room);
    if constexpr (kHasTiles) {
      // The same block's next rows; they are read while this piece is multiplied.
      const std::uint8_t* next = stretch.data + rows / 2 * stretch.pair_bytes;
      const std::int64_t groups = (tokens + kFewTokens - 1) / kFewTokens;
      const std::int64_t tile_lines = kTile / 2 * stretch.pair_bytes / kLineBytes;
      const std::int64_t lines = (tile_lines + groups - 1) / groups;
      for (std::int64_t token = 0; token < tokens; token += kFewTokens) {
        const std::int64_t group = (begin + token) / kFewTokens, here = x.tokens(group);
        const std::int64_t step = here * 2 * kTile;
        set_up.for_tokens(here);
        (here > kTile ? add_group<true> : add_group<false>)(
            x.group(group) + row / kTile * step, step, in_bf16, rows, is_first, next, lines,
            sums + token * kBlock);
        next += rows / kTile * lines * kLineBytes;
      }
    } else {
      for (std::int64_t token = 0; token < tokens; token += kGroup) {
        const auto some = std::min<std::int64_t>(kGroup, tokens - token);
        kAddRows[some - 1](x.data + (begin + token) * x.k + 2 * row, x.k, in_bf16, rows, is_first,
                           {}, sums + token * kBlock);
      }
    }
  }

  void add(float* sums, const float* more, std::int64_t tokens) const {
    for (std::int64_t at = 0; at < tokens * kBlock; at += kLanes) {
      store_floats(sums + at, plus(load_floats(sums + at), load_floats(more + at)));
    }
  }

  void finish(std::int64_t number, const ExpertTokens& x, std::int64_t block, float* sums) const {
    const Weight& w = weight(number);
    for (std::int64_t token = 0; token < x.count; token += kFewTokens) {
      const std::int64_t group = token / kFewTokens;
      const Places places = x.places(group);
      const Task task{x.group(group), w, nullptr, nullptr, places.m, places.stride, kHasTiles};
      add_outliers(task, block, 0, places.m, sums + token * kBlock);
    }
    store_(number, block, 0, x.count, sums);
  }

  const Experts& experts_;
  Weight Expert::* const which_;
  const Routing& routing_;
  const Tokens tokens_;
  const Store store_;
  const std::int64_t blocks_, pairs_;  // of an expert's weight
  const std::int64_t parts_, rows_;    // units of a block, and rows of each
  const int threads_;
  const std::int64_t wide_, columns_;  // blocks of a unit of many tokens, and such of an expert
  WorkQueue queue_;
  float* shared_ = nullptr;                      // sums of parts: [places][blocks][parts][kBlock]
  std::unique_ptr<std::atomic<int>[]> missing_;  // parts of each block that are not done
};

}  // namespace ray_hetero::RAY_HETERO_LEVEL

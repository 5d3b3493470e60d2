// y = x · Wᵀ + b in bf16, for the linear layers of a CPU rank.
//
// W is packed or compact, see weight.h.
//
// Few tokens (a decode step): every weight is read once, so the only thing that counts is that all
// threads stream W without a pause.  W is cut into units of up to 64 KiB, parts of blocks; each thread
// gets a run of neighbouring units, and who has finished takes units from the end of others' runs.
// Many tokens (a prefill): the tiles' multiplications count.  Tokens and a piece of W that fit
// together into the second-level cache are multiplied piece by piece.
//
// A sum is always taken over the same pieces in the same order, whichever thread took them: the
// result depends neither on the number of threads nor on chance.

#pragma once

#include "amx.h"
#include "processor.h"
#include "read_ahead.h"
#include "scratch.h"
#include "team.h"
#include "tokens.h"
#include "vectors.h"
#include "weight.h"
#include "work_queue.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

namespace ray_hetero {

constexpr std::int64_t kUnitRows = 512;     // most rows of a unit of few tokens
constexpr std::int64_t kFewTokens = 32;     // with AMX: two tiles
constexpr std::int64_t kAhead = 2;          // tiles that are expanded before they are needed
constexpr std::int64_t kRing = 4;           // tiles that are kept expanded
static_assert(kRing > kAhead);
constexpr std::int64_t kPieceRows = 128;    // what many tokens use before the next rows are read
constexpr std::int64_t kPieceTokens = 256;  // most tokens of a unit of many
constexpr std::int64_t kPieceBlocks = 4;    // and most blocks
constexpr std::int64_t kSlab = 1024;        // most tokens at once; bounds the memory for them

struct Task {
  const std::uint16_t* x;  // bf16, see places()
  Weight w;
  const float* bias;  // [n], or nullptr
  std::uint16_t* y;   // [m][n] bf16
  std::int64_t m, stride;
  bool use_amx;
  bool x_is_tiles = false;  // for AMX, and few tokens

  Places places() const { return {m, stride, x_is_tiles}; }
};

#if defined(__x86_64__)

RAY_HETERO_BF16 inline void store_token(const Task& task, std::int64_t token, std::int64_t block,
                                        const float* sums) {
  for (int half = 0; half < kBlock; half += kTile) {
    const std::int64_t at = block * kBlock + half;
    __m512 sum = _mm512_loadu_ps(sums + half);
    if (task.bias != nullptr) sum = _mm512_add_ps(sum, _mm512_loadu_ps(task.bias + at));
    store_bf16(task.y + token * task.w.n + at, sum);
  }
}

// An even number of rows, compact ones with their codebook.
template <int M, bool kCompact>
RAY_HETERO_BF16 void add_rows(const std::uint16_t* x, std::int64_t stride, const std::uint8_t* w,
                              const Compact* compact, std::int64_t rows, float* to) {
  Sums<M> sums;
  sums.clear();
  constexpr std::int64_t kBytes = kCompact ? kCompactPair : 2 * kRowBytes;
  __m512i codebook = _mm512_setzero_si512();
  if constexpr (kCompact) codebook = load_codebook(*compact);
  for (std::int64_t row = 0; row < rows; row += 2, w += kBytes, x += 4) {
    prefetch_lines(w, kBytes);
    if constexpr (kCompact) {
      const TwoRows two = expand_two(w, codebook);
      add_row<M>(x, stride, two.left[0], two.right[0], sums);
      add_row<M>(x + 2, stride, two.left[1], two.right[1], sums);
    } else {
      const std::uint8_t* next = w + kRowBytes;
      add_row<M>(x, stride, _mm512_loadu_si512(w), _mm512_loadu_si512(w + kRow), sums);
      add_row<M>(x + 2, stride, _mm512_loadu_si512(next), _mm512_loadu_si512(next + kRow), sums);
    }
  }
  sums.store(to, kBlock);
}

using AddRows = void (*)(const std::uint16_t*, std::int64_t, const std::uint8_t*, const Compact*,
                         std::int64_t, float*);
template <bool kCompact>
constexpr AddRows kAddRows[kGroup + 1] = {
    nullptr,
    add_rows<1, kCompact>, add_rows<2, kCompact>, add_rows<3, kCompact>, add_rows<4, kCompact>,
    add_rows<5, kCompact>, add_rows<6, kCompact>, add_rows<7, kCompact>, add_rows<8, kCompact>,
};

inline void sum_avx(const Task& task, std::int64_t block, std::int64_t row, std::int64_t rows,
                    float* sums) {
  const auto* add = task.w.compact != nullptr ? kAddRows<true> : kAddRows<false>;
  for (std::int64_t token = 0; token < task.m; token += kGroup) {
    const auto group = std::min<std::int64_t>(kGroup, task.m - token);
    add[group](task.x + token * task.stride + 2 * row, task.stride, task.w.rows(block, row),
               task.w.compact, rows, sums + token * kBlock);
  }
}

// What a block's outliers add to the sums [tokens][kBlock] of tokens from `begin` on.
inline void add_outliers(const Task& task, std::int64_t block, std::int64_t begin,
                           std::int64_t tokens, float* sums) {
  if (task.w.compact == nullptr) return;
  const Outlier* end = task.w.compact->end(block);
  for (const Outlier* one = task.w.compact->begin(block); one != end; ++one) {
    const float value = as_float(one->value);
    for (std::int64_t token = 0; token < tokens; ++token) {
      const float x = as_float(task.x[task.places().at(begin + token, one->k)]);
      sums[token * kBlock + one->output] += value * x;
    }
  }
}

// Rows of a unit, compact ones expanded tile by tile.
template <bool kTwo>
RAY_HETERO_AMX void sum_tiles(const std::uint16_t* x, std::int64_t step, const std::uint8_t* w,
                              const Compact* compact, std::int64_t rows, float* sums) {
  constexpr std::int64_t kTilePairs = kTile / 2;
  clear_sums<kTwo>();
  if (compact == nullptr) {
    for (std::int64_t row = 0; row < rows; row += kTile, x += step, w += kTile * kRowBytes) {
      prefetch_lines(w, kTile * kRowBytes);
      multiply<kTwo>(x, reinterpret_cast<const std::uint16_t*>(w));
    }
  } else {
    // A tile cannot be loaded from stores that are still on their way to the cache, so the next
    // tiles are expanded while this one is multiplied.
    std::uint16_t* ring = scratch_bf16(kRing * kTile * kRow, kExpanded);
    const __m512i codebook = load_codebook(*compact);
    const std::int64_t tiles = rows / kTile;
    for (std::int64_t tile = -kAhead; tile < tiles; ++tile) {
      if (tile + kAhead < tiles) {
        prefetch_lines(w, kTilePairs * kCompactPair);
        expand_rows(w, codebook, kTile, ring + (tile + kAhead) % kRing * kTile * kRow);
        w += kTilePairs * kCompactPair;
      }
      if (tile >= 0) multiply<kTwo>(x + tile * step, ring + tile % kRing * kTile * kRow);
    }
  }
  store_sums<kTwo>(sums);
}

// x [m][stride] as tiles [k / 32][m][32], so that the rows of a tile are neighbours.
RAY_HETERO_BF16 inline void pack_tokens(const Task& task, std::int64_t begin, std::int64_t end,
                                        std::uint16_t* packed) {
  const Places rows = task.places(), tiles{task.m, task.w.k, true};
  for (std::int64_t token = 0; token < task.m; ++token) {
    for (std::int64_t at = begin * 2 * kTile; at < end * 2 * kTile; at += 2 * kTile) {
      _mm512_storeu_si512(packed + tiles.at(token, at),
                          _mm512_loadu_si512(task.x + rows.at(token, at)));
    }
  }
}

// ---- few tokens ---------------------------------------------------------------------------------

class FewTokens {
 public:
  explicit FewTokens(const Task& task)
      : task_(task),
        parts_((task.w.pairs() + kUnitRows - 1) / kUnitRows),
        rows_((task.w.pairs() / kTile + parts_ - 1) / parts_ * kTile),
        threads_(omp_get_max_threads()),
        queue_(task.w.blocks() * parts_, threads_),
        missing_(new std::atomic<int>[task.w.blocks()]),
        sums_(reserve(task.w, task.m)) {
    for (std::int64_t block = 0; block < task.w.blocks(); ++block) {
      missing_[block].store(static_cast<int>(parts_), std::memory_order_relaxed);
    }
  }

  void run() {
#pragma omp parallel num_threads(threads_)
    work(omp_get_thread_num());
  }

  // Memory for the sums; products that share it have to reserve it before the first one begins.
  static float* reserve(const Weight& w, std::int64_t m) {
    const std::int64_t parts = (w.pairs() + kUnitRows - 1) / kUnitRows;
    return scratch(static_cast<std::size_t>(w.blocks() * parts * m * kBlock), kSums);
  }

  // The first weights of this thread's share.
  ReadAhead ahead(int thread) const {
    const Units units = queue_.first(thread);
    const std::int64_t bytes = units.count * rows_ / 2 * task_.w.pair_bytes();
    return {task_.w.rows(units.first / parts_, units.first % parts_ * rows_), bytes};
  }

  // One thread's share of the work; all of the team's threads have to come.
  void work(int thread) {
    const std::uint16_t* packed = nullptr;
    if (task_.use_amx) {
      packed = task_.x_is_tiles ? task_.x : own_tiles();
      configure_tiles(task_.m);
    }
    for (Units units; (units = queue_.next(thread, parts_)).count > 0;) {
      if (units.count == parts_) {
        whole_block(units.first / parts_, packed);
      } else {
        one_part(units.first, packed);
      }
    }
    if (task_.use_amx) release_tiles();
  }

 private:
  // A copy for each thread: a shared one would have all of them wait until it is there.
  const std::uint16_t* own_tiles() const {
    std::uint16_t* tiles = scratch_bf16(task_.m * task_.w.k, kOwnTokens);
    pack_tokens(task_, 0, task_.w.pairs() / kTile, tiles);
    return tiles;
  }

  // All parts of a block, whose sums stay with this thread.
  void whole_block(std::int64_t block, const std::uint16_t* packed) {
    const std::int64_t floats = task_.m * kBlock;
    float* sums = scratch(2 * floats, kOwnSums);
    for (std::int64_t part = 0; part < parts_; ++part) {
      float* to = part == 0 ? sums : sums + floats;
      sum(block * parts_ + part, packed, to);
      if (part > 0) add(sums, to);
    }
    store(block, sums);
  }

  // One part; who computes the last of a block puts them together.
  void one_part(std::int64_t unit, const std::uint16_t* packed) {
    const std::int64_t block = unit / parts_, floats = task_.m * kBlock;
    sum(unit, packed, sums_ + unit * floats);
    if (missing_[block].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    float* sums = sums_ + block * parts_ * floats;
    for (std::int64_t part = 1; part < parts_; ++part) add(sums, sums + part * floats);
    store(block, sums);
  }

  void sum(std::int64_t unit, const std::uint16_t* packed, float* sums) const {
    const std::int64_t block = unit / parts_, row = unit % parts_ * rows_;
    const std::int64_t rows = std::min(rows_, task_.w.pairs() - row);
    if (packed == nullptr) {
      sum_avx(task_, block, row, rows, sums);
    } else {
      const auto add = task_.m > kTile ? sum_tiles<true> : sum_tiles<false>;
      const std::int64_t step = task_.m * 2 * kTile;
      add(packed + row / kTile * step, step, task_.w.rows(block, row), task_.w.compact, rows, sums);
    }
  }

  RAY_HETERO_BF16 void add(float* sums, const float* more) const {
    for (std::int64_t at = 0; at < task_.m * kBlock; at += kTile) {
      _mm512_storeu_ps(sums + at,
                       _mm512_add_ps(_mm512_loadu_ps(sums + at), _mm512_loadu_ps(more + at)));
    }
  }

  void store(std::int64_t block, float* sums) const {
    add_outliers(task_, block, 0, task_.m, sums);
    for (std::int64_t token = 0; token < task_.m; ++token, sums += kBlock) {
      store_token(task_, token, block, sums);
    }
  }

  const Task& task_;
  const std::int64_t parts_, rows_;  // units of a block, and rows of each
  const int threads_;
  WorkQueue queue_;
  std::unique_ptr<std::atomic<int>[]> missing_;  // units of each block that are not done
  float* sums_;                                  // [units][m][kBlock]
};

// ---- many tokens, AMX only ----------------------------------------------------------------------

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
        packed_(scratch_bf16(task.m * task.w.k, kSharedTokens)),
        queue_(columns_ * groups_, threads_) {}

  void run() {
#pragma omp parallel num_threads(threads_)
    {
#pragma omp for schedule(static)
      for (std::int64_t tile = 0; tile < task_.w.pairs() / kTile; ++tile) {
        pack_tokens(task_, tile, tile + 1, packed_);
      }
      const int thread = omp_get_thread_num();
      for (Units units; (units = queue_.next(thread)).count > 0;) sum(units.first);
      release_tiles();
    }
  }

 private:
  void sum(std::int64_t unit) {
    const std::int64_t first = unit / groups_ * wide_;
    const std::int64_t last = std::min(first + wide_, task_.w.blocks());
    const std::int64_t begin = unit % groups_ * tokens_;
    const std::int64_t end = std::min(begin + tokens_, task_.m);
    const std::int64_t tokens = end - begin;
    if (tokens <= 0) return;
    float* sums = scratch((last - first) * tokens * kBlock, kSums);
    for (std::int64_t row = 0; row < task_.w.pairs(); row += kPieceRows) {
      const std::int64_t rows = std::min(kPieceRows, task_.w.pairs() - row);
      for (std::int64_t block = first; block < last; ++block) {
        add_piece(block, row, rows, begin, tokens, sums + (block - first) * tokens * kBlock);
      }
    }
    for (std::int64_t block = first; block < last; ++block) {
      add_outliers(task_, block, begin, tokens, sums);
      for (std::int64_t token = 0; token < tokens; ++token, sums += kBlock) {
        store_token(task_, begin + token, block, sums);
      }
    }
  }

  RAY_HETERO_AMX void add_piece(std::int64_t block, std::int64_t row, std::int64_t rows,
                                std::int64_t begin, std::int64_t tokens, float* sums) {
    const std::int64_t step = task_.m * 2 * kTile;
    const std::uint8_t* at = task_.w.rows(block, row);
    const auto* w = reinterpret_cast<const std::uint16_t*>(at);
    if (task_.w.compact != nullptr) {
      std::uint16_t* expanded = scratch_bf16(kPieceRows * kRow, kExpanded);
      expand_rows(at, load_codebook(*task_.w.compact), rows, expanded);
      w = expanded;
    }
    // The same block's next rows; they are read while this piece is multiplied.
    const std::uint8_t* next = at + rows / 2 * task_.w.pair_bytes();
    const std::int64_t groups = (tokens + 2 * kTile - 1) / (2 * kTile);
    const std::int64_t tile_lines = kTile / 2 * task_.w.pair_bytes() / kLineBytes;
    const std::int64_t lines = (tile_lines + groups - 1) / groups;
    for (std::int64_t token = 0; token < tokens; token += 2 * kTile) {
      const std::int64_t here = std::min<std::int64_t>(2 * kTile, tokens - token);
      if (token == 0 || here < 2 * kTile) configure_tiles(here);
      const auto add = here > kTile ? add_tiles<true> : add_tiles<false>;
      add(packed_ + row / kTile * step + (begin + token) * 2 * kTile, step, w, rows,
          row == 0, next + token / (2 * kTile) * rows / kTile * lines * kLineBytes, lines,
          sums + token * kBlock);
    }
  }

  template <bool kTwo>
  RAY_HETERO_AMX static void add_tiles(const std::uint16_t* x, std::int64_t step,
                                       const std::uint16_t* w, std::int64_t rows, bool is_first,
                                       const std::uint8_t* next, std::int64_t lines, float* sums) {
    if (is_first) {
      clear_sums<kTwo>();
    } else {
      load_sums<kTwo>(sums);
    }
    for (std::int64_t row = 0; row < rows; row += kTile, x += step) {
      for (std::int64_t line = 0; line < lines; ++line, next += kLineBytes) {
        _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T1);
      }
      multiply<kTwo>(x, w + row * kRow);
    }
    store_sums<kTwo>(sums);
  }

  const Task& task_;
  const int threads_;
  const std::int64_t groups_, tokens_;  // groups of tokens, and tokens of each
  const std::int64_t wide_, columns_;   // blocks of a unit, and units of a group
  std::uint16_t* packed_;               // [k / 32][m][32]
  WorkQueue queue_;
};

inline void run(Task task) {
  for (std::int64_t left = task.m; left > 0; left -= task.m) {
    task.m = task.use_amx ? std::min(left, kSlab) : left;
    if (task.use_amx && task.m > kFewTokens) {
      ManyTokens(task).run();
    } else {
      FewTokens(task).run();
    }
    task.x += task.m * task.stride;
    task.y += task.m * task.w.n;
  }
}

#else

inline void run(Task) {}

#endif

}  // namespace ray_hetero

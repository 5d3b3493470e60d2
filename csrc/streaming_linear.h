// y = x · Wᵀ + b in bf16, for the linear layers of a CPU rank.
//
// W is packed or compact, see weights.h.
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

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "weights.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ray_hetero {

constexpr int kTile = 16;                   // tokens, outputs and pairs of k of an AMX tile
constexpr std::int64_t kUnitRows = 512;     // most rows of a unit of few tokens
constexpr std::int64_t kFewTokens = 32;     // with AMX: two tiles
constexpr std::int64_t kFar = 8192;         // bytes from a load to its prefetch into the L2 cache
constexpr std::int64_t kNear = 2048;        // … and into L1, whose fill buffers are few
constexpr std::int64_t kAhead = 2;          // tiles that are expanded before they are needed
constexpr std::int64_t kRing = 4;           // tiles that are kept expanded
static_assert(kRing > kAhead);
constexpr std::int64_t kPieceRows = 128;    // what many tokens use before the next rows are read
constexpr std::int64_t kPieceTokens = 256;  // most tokens of a unit of many
constexpr std::int64_t kPieceBlocks = 4;    // and most blocks
constexpr std::int64_t kSlab = 1024;        // most tokens at once; bounds the memory for them
constexpr std::int64_t kLineBytes = 64;     // of a cache line

// Where bf16 of tokens are: row by row [m][stride], or as tiles [stride / 32][m][32], which AMX
// loads as they lie.
struct Places {
  std::int64_t m, stride;
  bool are_tiles;

  std::int64_t elements() const { return m * stride; }
  // Of a token's element i; the others of the same 32 are beside it.
  std::int64_t at(std::int64_t token, std::int64_t i) const {
    if (!are_tiles) return token * stride + i;
    return (i / (2 * kTile) * m + token) * 2 * kTile + i % (2 * kTile);
  }
};

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

// ---- the work of a call, shared out among threads -----------------------------------------------

// Neighbouring units that a thread has taken; none if there were none left.
struct Units {
  std::int64_t first = 0, count = 0;
};

// Units that one thread has still to do.  Its owner takes them from the front, others from the end.
class alignas(64) Run {
 public:
  void set(std::uint64_t begin, std::uint64_t end) { range_ = begin << 32 | end; }
  Units left() const {
    const std::uint64_t range = range_.load(std::memory_order_relaxed);
    const auto begin = static_cast<std::int64_t>(range >> 32);
    return {begin, static_cast<std::int64_t>(range & 0xffffffff) - begin};
  }
  // One unit, or the `whole` of a group while there are enough of them left for others to take.
  Units take_first(std::uint64_t whole) {
    return take([whole](std::uint64_t begin, std::uint64_t end) {
      const bool is_whole = begin % whole == 0 && end - begin >= kGroupsLeft * whole;
      const std::uint64_t count = is_whole ? whole : 1;
      return Taken{begin + count, end, begin, count};
    });
  }
  Units take_last() {
    return take([](std::uint64_t begin, std::uint64_t end) {
      return Taken{begin, end - 1, end - 1, 1};
    });
  }

 private:
  static constexpr std::uint64_t kGroupsLeft = 3;
  struct Taken {
    std::uint64_t left_begin, left_end, first, count;
  };

  template <typename How>
  Units take(How how) {
    std::uint64_t range = range_.load(std::memory_order_relaxed);
    for (;;) {
      const std::uint64_t begin = range >> 32, end = range & 0xffffffff;
      if (begin >= end) return {};
      const Taken taken = how(begin, end);
      const std::uint64_t left = taken.left_begin << 32 | taken.left_end;
      if (range_.compare_exchange_weak(range, left, std::memory_order_relaxed)) {
        return {static_cast<std::int64_t>(taken.first), static_cast<std::int64_t>(taken.count)};
      }
    }
  }

  std::atomic<std::uint64_t> range_{0};
};

class Runs {
 public:
  Runs(std::int64_t units, int threads) : runs_(new Run[threads]), threads_(threads) {
    for (int thread = 0; thread < threads; ++thread) {
      runs_[thread].set(units * thread / threads, units * (thread + 1) / threads);
    }
  }
  // The units that this thread begins with.
  Units first(int thread) const { return runs_[thread].left(); }
  // The next for this thread: one, or all of a group of `whole`.
  Units next(int thread, std::uint64_t whole = 1) {
    Units units = runs_[thread].take_first(whole);
    for (int other = 1; units.count == 0 && other < threads_; ++other) {
      units = runs_[(thread + other) % threads_].take_last();
    }
    return units;
  }

 private:
  std::unique_ptr<Run[]> runs_;
  int threads_;
};

// Memory that a thread keeps from call to call: fresh pages would cost more than the sums.
class Scratch {
 public:
  // At least `bytes`, on a cache line: tiles whose rows straddle two lines load half as fast.
  void* get(std::size_t bytes) {
    if (bytes > size_) {
      const std::size_t size = (bytes + kLine - 1) / kLine * kLine;
      size_ = 0;
      memory_.reset(std::aligned_alloc(kLine, size));
      if (memory_ == nullptr) throw std::bad_alloc();
      size_ = size;
    }
    return memory_.get();
  }

 private:
  static constexpr std::size_t kLine = 64;
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  std::size_t size_ = 0;
};

// What a thread keeps: sums for all threads and its own, tokens packed for all and for itself, rows
// that were compact; what is between the products of between_attentions.h, parts of attention.h,
// what is between the layers of decoder_layers.h.
enum Buffer {
  kSums, kOwnSums, kSharedTokens, kOwnTokens, kExpanded, kBetween, kPartial, kLayers, kBuffers
};

inline float* scratch(std::size_t floats, Buffer which) {
  static thread_local Scratch kept[kBuffers];
  return static_cast<float*>(kept[which].get(floats * sizeof(float)));
}

inline std::uint16_t* scratch_bf16(std::size_t elements, Buffer which) {
  return reinterpret_cast<std::uint16_t*>(scratch((elements + 1) / 2, which));
}

RAY_HETERO_BF16 inline void store_bf16(std::uint16_t* at, __m512 values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), (__m256i)_mm512_cvtneps_pbh(values));
}

RAY_HETERO_BF16 inline void store_token(const Task& task, std::int64_t token, std::int64_t block,
                                        const float* sums) {
  for (int half = 0; half < kBlock; half += kTile) {
    const std::int64_t at = block * kBlock + half;
    __m512 sum = _mm512_loadu_ps(sums + half);
    if (task.bias != nullptr) sum = _mm512_add_ps(sum, _mm512_loadu_ps(task.bias + at));
    store_bf16(task.y + token * task.w.n + at, sum);
  }
}

// The hardware's prefetcher stops at the end of each page, and tile loads hardly set it off.
inline void prefetch_lines(const std::uint8_t* at, std::int64_t bytes) {
  for (std::int64_t line = 0; line < bytes; line += kLineBytes) {
    _mm_prefetch(reinterpret_cast<const char*>(at + line + kFar), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(at + line + kNear), _MM_HINT_T0);
  }
}

// ---- AVX-512: sums of up to kGroup tokens stay in registers, two for each token -----------------

constexpr int kGroup = 8;

template <int M>
struct Sums {
  __m512 left[M], right[M];

  RAY_HETERO_BF16 RAY_HETERO_INLINE void clear() {
    for (int i = 0; i < M; ++i) left[i] = right[i] = _mm512_setzero_ps();
  }
  RAY_HETERO_BF16 RAY_HETERO_INLINE void load(const float* from, std::int64_t stride) {
    for (int i = 0; i < M; ++i) {
      left[i] = _mm512_loadu_ps(from + i * stride);
      right[i] = _mm512_loadu_ps(from + i * stride + kTile);
    }
  }
  RAY_HETERO_BF16 RAY_HETERO_INLINE void store(float* to, std::int64_t stride) const {
    for (int i = 0; i < M; ++i) {
      _mm512_storeu_ps(to + i * stride, left[i]);
      _mm512_storeu_ps(to + i * stride + kTile, right[i]);
    }
  }
};

template <int M>
RAY_HETERO_BF16 inline void add_row(const std::uint16_t* x, std::int64_t stride, __m512i left,
                                    __m512i right, Sums<M>& sums) {
  for (int i = 0; i < M; ++i) {
    std::int32_t pair;
    __builtin_memcpy(&pair, x + i * stride, sizeof(pair));
    const auto both = (__m512bh)_mm512_set1_epi32(pair);
    sums.left[i] = _mm512_dpbf16_ps(sums.left[i], (__m512bh)left, both);
    sums.right[i] = _mm512_dpbf16_ps(sums.right[i], (__m512bh)right, both);
  }
}

// An even number of rows, compact ones with their book.
template <int M, bool kCompact>
RAY_HETERO_BF16 void add_rows(const std::uint16_t* x, std::int64_t stride, const std::uint8_t* w,
                              const Compact* compact, std::int64_t rows, float* to) {
  Sums<M> sums;
  sums.clear();
  constexpr std::int64_t kBytes = kCompact ? kCompactPair : 2 * kRowBytes;
  __m512i book = _mm512_setzero_si512();
  if constexpr (kCompact) book = load_book(*compact);
  for (std::int64_t row = 0; row < rows; row += 2, w += kBytes, x += 4) {
    prefetch_lines(w, kBytes);
    if constexpr (kCompact) {
      const TwoRows two = expand_two(w, book);
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

inline float as_float(std::uint16_t value) {
  const std::uint32_t bits = std::uint32_t{value} << 16;
  float widened;
  __builtin_memcpy(&widened, &bits, sizeof(widened));
  return widened;
}

// What a block's exceptions add to the sums [tokens][kBlock] of tokens from `begin` on.
inline void add_exceptions(const Task& task, std::int64_t block, std::int64_t begin,
                           std::int64_t tokens, float* sums) {
  if (task.w.compact == nullptr) return;
  const Exception* end = task.w.compact->end(block);
  for (const Exception* one = task.w.compact->begin(block); one != end; ++one) {
    const float value = as_float(one->value);
    for (std::int64_t token = 0; token < tokens; ++token) {
      const float x = as_float(task.x[task.places().at(begin + token, one->k)]);
      sums[token * kBlock + one->output] += value * x;
    }
  }
}

// ---- AMX: up to two tiles of tokens times the two halves of a block -----------------------------

// The intrinsics want literal numbers: tiles 0 to 3 are sums, 4 and 5 tokens, 6 and 7 weights.

// Operand of LDTILECFG, Intel SDM volume 1, table 18-2.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t bytes_per_row[16] = {};
  std::uint8_t rows[16] = {};

  // For up to 32 tokens.
  explicit TileConfig(std::int64_t tokens) {
    const auto first = static_cast<std::uint8_t>(std::min<std::int64_t>(tokens, kTile));
    const auto second = static_cast<std::uint8_t>(tokens - first);
    const std::uint8_t heights[8] = {first, first, second, second, first, second, kTile, kTile};
    for (int tile = 0; tile < 8; ++tile) {
      rows[tile] = heights[tile];
      bytes_per_row[tile] = heights[tile] ? 64 : 0;
    }
  }
};

constexpr int kSumStride = kBlock * sizeof(float);
constexpr int kTokenStride = 2 * kTile * sizeof(std::uint16_t);

template <bool kTwo>
RAY_HETERO_AMX inline void load_sums(const float* sums) {
  _tile_loadd(0, sums, kSumStride);
  _tile_loadd(1, sums + kTile, kSumStride);
  if constexpr (kTwo) {
    _tile_loadd(2, sums + kTile * kBlock, kSumStride);
    _tile_loadd(3, sums + kTile * kBlock + kTile, kSumStride);
  }
}

template <bool kTwo>
RAY_HETERO_AMX inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <bool kTwo>
RAY_HETERO_AMX inline void store_sums(float* sums) {
  _tile_stored(0, sums, kSumStride);
  _tile_stored(1, sums + kTile, kSumStride);
  if constexpr (kTwo) {
    _tile_stored(2, sums + kTile * kBlock, kSumStride);
    _tile_stored(3, sums + kTile * kBlock + kTile, kSumStride);
  }
}

// 16 rows of W times up to 32 tokens, whose tiles of [tokens][32] begin at x.
template <bool kTwo>
RAY_HETERO_AMX inline void multiply(const std::uint16_t* x, const std::uint16_t* w) {
  _tile_loadd(6, w, kRowBytes);
  _tile_loadd(7, w + kBlock, kRowBytes);
  _tile_loadd(4, x, kTokenStride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kTwo) {
    _tile_loadd(5, x + kTile * 2 * kTile, kTokenStride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
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
    const __m512i book = load_book(*compact);
    const std::int64_t tiles = rows / kTile;
    for (std::int64_t tile = -kAhead; tile < tiles; ++tile) {
      if (tile + kAhead < tiles) {
        prefetch_lines(w, kTilePairs * kCompactPair);
        expand_rows(w, book, kTile, ring + (tile + kAhead) % kRing * kTile * kRow);
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

RAY_HETERO_AMX inline void configure_tiles(std::int64_t tokens) {
  const TileConfig config(tokens);
  _tile_loadconfig(&config);
}

RAY_HETERO_AMX inline void release_tiles() { _tile_release(); }

// ---- waiting for the other threads --------------------------------------------------------------

// Weights that a thread will begin with, for the second-level cache.
class Ahead {
 public:
  Ahead(const std::uint8_t* at, std::int64_t bytes)
      : at_(at), end_(at + std::min(bytes, kMostBytes)) {}

  // Have a few more lines come.
  void fetch() {
    for (int line = 0; line < kLines && at_ < end_; ++line, at_ += kLineBytes) {
      _mm_prefetch(reinterpret_cast<const char*>(at_), _MM_HINT_T1);
    }
  }

 private:
  static constexpr std::int64_t kMostBytes = 256 << 10;  // a fraction of the cache
  static constexpr int kLines = 4;

  const std::uint8_t *at_, *end_;
};

// OpenMP's own barrier does nothing while a thread waits; here memory is not idle meanwhile.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}

  void wait(Ahead& ahead) {
    const int round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int turn = 1; round_.load(std::memory_order_acquire) == round; ++turn) {
      ahead.fetch();
      _mm_pause();
      // Somebody may wait for this core.
      if (turn % kTurns == 0) sched_yield();
    }
  }

 private:
  static constexpr int kTurns = 1024;

  const int threads_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> round_{0};
};

// Have all threads do something; a runtime may give fewer than it could.
template <typename Work>
void together(const Work& work) {
  std::optional<Barrier> barrier;
#pragma omp parallel
  {
#pragma omp single
    barrier.emplace(omp_get_num_threads());
    work(omp_get_thread_num(), omp_get_num_threads(), *barrier);
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
        runs_(task.w.blocks() * parts_, threads_),
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
  Ahead ahead(int thread) const {
    const Units units = runs_.first(thread);
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
    for (Units units; (units = runs_.next(thread, parts_)).count > 0;) {
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
    add_exceptions(task_, block, 0, task_.m, sums);
    for (std::int64_t token = 0; token < task_.m; ++token, sums += kBlock) {
      store_token(task_, token, block, sums);
    }
  }

  const Task& task_;
  const std::int64_t parts_, rows_;  // units of a block, and rows of each
  const int threads_;
  Runs runs_;
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
        runs_(columns_ * groups_, threads_) {}

  void run() {
#pragma omp parallel num_threads(threads_)
    {
#pragma omp for schedule(static)
      for (std::int64_t tile = 0; tile < task_.w.pairs() / kTile; ++tile) {
        pack_tokens(task_, tile, tile + 1, packed_);
      }
      const int thread = omp_get_thread_num();
      for (Units units; (units = runs_.next(thread)).count > 0;) sum(units.first);
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
      add_exceptions(task_, block, begin, tokens, sums);
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
      expand_rows(at, load_book(*task_.w.compact), rows, expanded);
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
  Runs runs_;
};

inline bool has_bf16() {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl");
}

// Whether there is AMX-BF16 and the kernel lets this process use its state.
inline bool has_amx() {
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h, not in every libc
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & kBf16) == 0 || (edx & kTiles) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

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

inline bool has_bf16() { return false; }
inline bool has_amx() { return false; }
inline void run(Task) {}

#endif

}  // namespace ray_hetero

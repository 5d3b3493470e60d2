// Weights asked for before they are needed.  The hardware's prefetcher stops at the end of each
// page, and tile loads hardly set it off.

#pragma once

#include <algorithm>
#include <cstdint>

namespace ray_hetero {

constexpr std::int64_t kPrefetchL2Bytes = 8192;  // bytes from a load to its prefetch into the L2 cache
constexpr std::int64_t kPrefetchL1Bytes = 2048;  // and into L1, whose fill buffers are few
constexpr std::int64_t kLineBytes = 64;  // of a cache line

// GCC takes functions that only prefetch for such that do nothing, unless they are in their callers.
#define RAY_HETERO_PREFETCH __attribute__((always_inline)) inline

RAY_HETERO_PREFETCH void prefetch_l2(const void* at) { __builtin_prefetch(at, 0, 2); }
RAY_HETERO_PREFETCH void prefetch_l1(const void* at) { __builtin_prefetch(at, 0, 3); }

// Lines that will be read soon after those at `at`.
RAY_HETERO_PREFETCH void prefetch_lines(const std::uint8_t* at, std::int64_t bytes) {
  for (std::int64_t line = 0; line < bytes; line += kLineBytes) {
    prefetch_l2(at + line + kPrefetchL2Bytes);
    prefetch_l1(at + line + kPrefetchL1Bytes);
  }
}

// Weights that a thread will begin with, for the second-level cache.
class ReadAhead {
 public:
  ReadAhead(const std::uint8_t* at, std::int64_t bytes)
      : at_(at), end_(at + std::min(bytes, kMostBytes)) {}

  // Have a few more lines come.
  void fetch() {
    for (int line = 0; line < kLines && at_ < end_; ++line, at_ += kLineBytes) prefetch_l2(at_);
  }

 private:
  static constexpr std::int64_t kMostBytes = 256 << 10;  // a fraction of the cache
  static constexpr int kLines = 4;

  const std::uint8_t *at_, *end_;
};

}  // namespace ray_hetero

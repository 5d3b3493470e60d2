// Weights asked for before they are needed.  The hardware's prefetcher stops at the end of each page,
// and tile loads hardly set it off.

#pragma once

#include "vectors.h"

#include <algorithm>
#include <cstdint>

namespace ray_hetero {

constexpr std::int64_t kPrefetchL2Bytes = 8192;  // bytes from a load to its prefetch into the L2 cache
constexpr std::int64_t kPrefetchL1Bytes = 2048;  // … and into L1, whose fill buffers are few
constexpr std::int64_t kLineBytes = 64;  // of a cache line

#if defined(__x86_64__)

// The hardware's prefetcher stops at the end of each page, and tile loads hardly set it off.
inline void prefetch_lines(const std::uint8_t* at, std::int64_t bytes) {
  for (std::int64_t line = 0; line < bytes; line += kLineBytes) {
    _mm_prefetch(reinterpret_cast<const char*>(at + line + kPrefetchL2Bytes), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(at + line + kPrefetchL1Bytes), _MM_HINT_T0);
  }
}

// Weights that a thread will begin with, for the second-level cache.
class ReadAhead {
 public:
  ReadAhead(const std::uint8_t* at, std::int64_t bytes)
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

#endif

}  // namespace ray_hetero

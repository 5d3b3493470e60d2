// What the programs here measure with.

#pragma once

#include "kernels/levels.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace measuring {

using Bf16 = std::uint16_t;

// Seconds.
inline double now() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

// Pages that nobody has touched, huge ones if the system gives them, as CPU ranks ask for; the program
// ends if there are none.
template <typename T>
T* allocate(std::size_t count) {
  constexpr std::size_t kHuge = 2 << 20;
  const std::size_t bytes = (count * sizeof(T) + kHuge - 1) / kHuge * kHuge;
  void* memory = mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    std::exit(1);
  }
  const auto address = (reinterpret_cast<std::uintptr_t>(memory) + kHuge - 1) / kHuge * kHuge;
  if (bytes > kHuge) madvise(reinterpret_cast<void*>(address), bytes, MADV_HUGEPAGE);
  return reinterpret_cast<T*>(address);
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Bytes of a weight in memory, with its scales.
inline std::int64_t bytes_of(const ray_hetero::Weight& weight) {
  if (const auto* scaled = dynamic_cast<const ray_hetero::Scaled*>(weight.encoding)) {
    return scaled->blocks() * scaled->block_bytes();
  }
  return weight.blocks() * weight.pairs() / 2 * weight.encoding->block(weight.data, 0).pair_bytes;
}

// Seconds of plain reads of all weights.
inline double read_once(const std::vector<ray_hetero::Weight>& weights) {
  const double start = now();
  std::uint64_t sum = 0;
#pragma omp parallel reduction(^ : sum)
  for (const ray_hetero::Weight& weight : weights) {
    const auto* words = reinterpret_cast<const std::uint64_t*>(weight.data);
    const std::int64_t bytes = bytes_of(weight);
#pragma omp for nowait
    for (std::int64_t i = 0; i < bytes / 8; ++i) sum ^= words[i];
  }
  volatile std::uint64_t sink = sum;
  static_cast<void>(sink);
  return now() - start;
}

}  // namespace measuring

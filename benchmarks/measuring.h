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

// Pages that nobody has touched; the program ends if there are none.
template <typename T>
T* allocate(std::size_t count) {
  void* memory = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    std::exit(1);
  }
  return static_cast<T*>(memory);
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

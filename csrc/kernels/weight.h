// A weight [N, K] of a linear layer in host memory, in one of the formats here.

#pragma once

#include "formats/compact.h"
#include "formats/packed.h"

#include <cstdint>

namespace ray_hetero {

// Weights [n, k] of a layer, packed or compact.
struct Weight {
  const std::uint8_t* data = nullptr;
  std::int64_t n = 0, k = 0;
  const Compact* compact = nullptr;  // nullptr if packed

  std::int64_t blocks() const { return n / kBlock; }
  std::int64_t pairs() const { return k / 2; }
  // Bytes of two rows.
  std::int64_t pair_bytes() const { return compact != nullptr ? kCompactPair : 2 * kRowBytes; }
  // From row `row`, an even one, of a block on.
  const std::uint8_t* rows(std::int64_t block, std::int64_t row) const {
    return data + (block * pairs() + row) / 2 * pair_bytes();
  }
};

#if defined(__x86_64__)

RAY_HETERO_BF16 inline void expand_block(const Weight& weight, std::int64_t block,
                                         std::uint16_t* to) {
  const Compact& compact = *weight.compact;
  expand_rows(weight.rows(block, 0), load_codebook(compact), weight.pairs(), to);
  for (const Outlier* one = compact.begin(block); one != compact.end(block); ++one) {
    to[one->k / 2 * kRow + 2 * one->output + one->k % 2] = one->value;
  }
}

// The packed rows of a compact weight.
inline void expand(const Weight& weight, std::uint16_t* packed) {
#pragma omp parallel for schedule(static)
  for (std::int64_t block = 0; block < weight.blocks(); ++block) {
    expand_block(weight, block, packed + block * weight.pairs() * kRow);
  }
}

#else

inline void expand(const Weight&, std::uint16_t*) {}

#endif

}  // namespace ray_hetero

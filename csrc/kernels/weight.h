// A weight [n, k] of a linear layer in host memory.

#pragma once

#include "formats/all.h"

#include <cstdint>

namespace ray_hetero {

struct Weight {
  const std::uint8_t* data = nullptr;
  const Encoding* encoding = nullptr;
  // Of each so many blocks only the first `kept` ones are computed with; 0: all of them.
  std::int64_t kept = 0, of = 1;

  std::int64_t n() const { return blocks() * kBlock; }
  std::int64_t k() const { return encoding->k(); }
  std::int64_t blocks() const {
    return kept == 0 ? encoding->blocks() : encoding->blocks() / of * kept;
  }
  std::int64_t pairs() const { return encoding->pairs(); }
  // A block's number among all of them.
  std::int64_t stored(std::int64_t block) const {
    return kept == 0 ? block : block / kept * of + block % kept;
  }
  Stretch stretch(std::int64_t block, std::int64_t first, std::int64_t rows) const {
    const BlockRows held = encoding->block(data, stored(block));
    const std::uint8_t* at = held.data + first / 2 * held.pair_bytes;
    return {*encoding, held.format, held.pair_bytes, stored(block), first, rows, at};
  }
  Outliers outliers(std::int64_t block) const { return encoding->outliers(stored(block)); }
  Outliers outliers_of_rows(std::int64_t block, std::int64_t row, std::int64_t rows) const {
    return encoding->outliers_of_rows(stored(block), row, rows);
  }
};

}  // namespace ray_hetero

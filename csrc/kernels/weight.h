// A weight [n, k] of a linear layer in host memory.

#pragma once

#include "formats/all.h"

#include <cstdint>

namespace ray_hetero {

struct Weight {
  const std::uint8_t* data = nullptr;
  const Encoding* encoding = nullptr;

  std::int64_t n() const { return encoding->n(); }
  std::int64_t k() const { return encoding->k(); }
  std::int64_t blocks() const { return encoding->blocks(); }
  std::int64_t pairs() const { return encoding->pairs(); }
  Stretch stretch(std::int64_t block, std::int64_t first, std::int64_t rows) const {
    const BlockRows held = encoding->block(data, block);
    const std::uint8_t* at = held.data + first / 2 * held.pair_bytes;
    return {*encoding, held.format, held.pair_bytes, block, first, rows, at};
  }
};

}  // namespace ray_hetero

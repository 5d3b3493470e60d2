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
  // Bytes of two rows.
  std::int64_t pair_bytes() const { return encoding->pair_bytes(); }
  Stretch stretch(std::int64_t block, std::int64_t first, std::int64_t rows) const {
    const std::uint8_t* at = data + (block * pairs() + first) / 2 * pair_bytes();
    return {*encoding, block, first, rows, at};
  }
};

}  // namespace ray_hetero

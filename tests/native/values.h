// Values in bf16 for programs that test csrc.

#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

namespace values {

inline std::uint16_t narrowed(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline std::vector<std::uint16_t> random(std::size_t count, float scale, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<std::uint16_t> made(count);
  for (auto& value : made) value = narrowed(normal(generator));
  return made;
}

}  // namespace values

// A checkpoint's codes in the order in which kernels read them: blocks of 32 outputs, of which each
// has all its codes and then its scales by group (formats/scaled.h).

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ray_hetero {

// Outputs of a block.
constexpr std::int64_t kArranged = 32;

// Matrix of codes and its scales, an output after the other.
struct StoredCodes {
  const std::uint8_t* codes;
  std::int64_t code_stride;  // bytes from one output to the next
  const std::uint8_t* scales;
  std::int64_t scale_stride;
  std::int64_t inputs;  // a multiple of 32
  std::int64_t groups;  // of inputs with a scale
  std::int64_t scale_bytes;
};

// Codes of four bits, two in a byte: see formats/fp4.h.
inline void arrange_nibbles(const StoredCodes& stored, const std::int64_t* outputs,
                            std::uint8_t* to) {
  for (std::int64_t at = 0; at < stored.inputs / 4; ++at) {
    for (std::int64_t pair = 0; pair < kArranged / 2; ++pair) {
      std::uint16_t left, right;
      std::memcpy(&left, stored.codes + outputs[pair] * stored.code_stride + 2 * at, 2);
      std::memcpy(&right, stored.codes + outputs[pair + 16] * stored.code_stride + 2 * at, 2);
      const std::uint32_t low = (left & 0x0f0fu) | (right & 0x0f0fu) << 4;
      const std::uint32_t high = (left >> 4 & 0x0f0fu) | (right & 0xf0f0u);
      const std::uint32_t both = low | high << 16;
      std::memcpy(to + 4 * (at * kArranged / 2 + pair), &both, 4);
    }
  }
}

// Codes of eight bits: see formats/fp8.h.
inline void arrange_bytes(const StoredCodes& stored, const std::int64_t* outputs,
                          std::uint8_t* to) {
  for (std::int64_t at = 0; at < stored.inputs / 2; ++at) {
    for (std::int64_t pair = 0; pair < kArranged / 2; ++pair) {
      const std::uint8_t* left = stored.codes + outputs[pair] * stored.code_stride + 2 * at;
      const std::uint8_t* right = stored.codes + outputs[pair + 16] * stored.code_stride + 2 * at;
      const std::uint8_t both[4] = {left[0], right[0], left[1], right[1]};
      std::memcpy(to + 4 * (at * kArranged / 2 + pair), both, 4);
    }
  }
}

template <typename Scale>
void arrange_scales(const StoredCodes& stored, const std::int64_t* outputs, std::uint8_t* to) {
  for (std::int64_t one = 0; one < kArranged; ++one) {
    const std::uint8_t* from = stored.scales + outputs[one] * stored.scale_stride;
    for (std::int64_t group = 0; group < stored.groups; ++group) {
      std::memcpy(to + sizeof(Scale) * (group * kArranged + one), from + sizeof(Scale) * group,
                  sizeof(Scale));
    }
  }
}

// Blocks of a matrix; `outputs` has for each output the stored one that takes its place.
inline void arrange(const StoredCodes& stored, int bits, const std::int64_t* outputs,
                    std::int64_t count, std::int64_t block_bytes, std::uint8_t* to) {
  const std::int64_t scales_at = kArranged * stored.inputs * bits / 8;
  const std::int64_t end = scales_at + kArranged * stored.groups * stored.scale_bytes;
  for (std::int64_t block = 0; block < count / kArranged; ++block) {
    const std::int64_t* its = outputs + block * kArranged;
    std::uint8_t* place = to + block * block_bytes;
    bits == 4 ? arrange_nibbles(stored, its, place) : arrange_bytes(stored, its, place);
    if (stored.scale_bytes == 1) {
      arrange_scales<std::uint8_t>(stored, its, place + scales_at);
    } else if (stored.scale_bytes == 2) {
      arrange_scales<std::uint16_t>(stored, its, place + scales_at);
    } else {
      arrange_scales<std::uint32_t>(stored, its, place + scales_at);
    }
    std::memset(place + end, 0, static_cast<std::size_t>(block_bytes - end));
  }
}

}  // namespace ray_hetero

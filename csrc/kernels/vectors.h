// What the vectors of all levels have in common (vectors/ has a file for each instruction set).

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
// GCC 12 takes the undefined operands of some of its own intrinsics for mistakes (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

// For what is done a row at a time; a call would pass its vectors through memory.
#define RAY_HETERO_INLINE __attribute__((always_inline)) inline

namespace ray_hetero {

constexpr int kLanes = 16;  // floats of a vector

constexpr float kLargeCodes = 8388608.0f;  // 2^23: from here on floats are integers

// What an E4M3 whose exponent is 0, by its last four bits, has too little as a bf16 · 2^-8 that is
// read as 2^-15 · (1 + m / 8): 2^-14 · m / 8 is meant.
constexpr std::uint16_t kE4m3Missing[16] = {
    0x0000 - 0x3800 + 0x10000, 0x3700 - 0x3810 + 0x10000, 0x3780 - 0x3820 + 0x10000,
    0x37c0 - 0x3830 + 0x10000, 0x3800 - 0x3840 + 0x10000, 0x3820 - 0x3850 + 0x10000,
    0x3840 - 0x3860 + 0x10000, 0x3860 - 0x3870 + 0x10000};

constexpr float kLog2E = 1.44269504f;  // e^x = 2^(x · log2 e)

// Of 2^f, |f| ≤ 1/2, by powers of f; good to 2e-7.
constexpr float kPowerSeries[] = {1.0f,          0.69314718f,   0.24022651f,  0.055504109f,
                                  0.0096181291f, 0.0013333558f, 0.00015403530f};

RAY_HETERO_INLINE float as_float(std::uint16_t value) {
  const std::uint32_t bits = std::uint32_t{value} << 16;
  float widened;
  std::memcpy(&widened, &bits, sizeof(widened));
  return widened;
}

// The nearest bf16, the even one of two; NaN stays NaN.
RAY_HETERO_INLINE std::uint16_t as_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const std::uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const std::uint32_t quiet = bits >> 16 | 0x40;
  return static_cast<std::uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

// A float16's value, as VCVTPH2PS has it.
RAY_HETERO_INLINE float half_as_float(std::uint16_t value) {
  const std::uint32_t sign = (value & 0x8000u) << 16, rest = value & 0x7fffu;
  if (rest < 0x400) {
    const float small = static_cast<float>(static_cast<std::int32_t>(rest)) * 0x1p-24f;
    return sign != 0 ? -small : small;
  }
  std::uint32_t bits = sign | ((rest << 13) + (112u << 23));
  if (rest >= 0x7c00) bits = sign | 0x7f800000 | rest << 13 | (rest > 0x7c00 ? 0x400000 : 0);
  float widened;
  std::memcpy(&widened, &bits, sizeof(widened));
  return widened;
}

// The nearest float16, the even one of two, as VCVTPS2PH has it; NaN stays NaN.
RAY_HETERO_INLINE std::uint16_t as_half(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
  const std::uint32_t rest = bits & 0x7fffffff;
  std::uint32_t found;
  if (rest > 0x7f800000) {
    found = 0x7e00 | (rest >> 13 & 0x3ff);
  } else if (rest >= 0x477ff000) {
    found = 0x7c00;
  } else if (rest >= 0x38800000) {
    found = (rest + 0xfff + (rest >> 13 & 1) - (112u << 23)) >> 13;
  } else {
    // Steps of 2^-24, as those of floats from 1/2 on are.
    float small;
    std::memcpy(&small, &rest, sizeof(small));
    small += 0.5f;
    std::memcpy(&found, &small, sizeof(found));
    found -= 0x3f000000;
  }
  return static_cast<std::uint16_t>(sign | found);
}

}  // namespace ray_hetero

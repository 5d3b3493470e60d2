// Floats of eight bits, E4M3 without infinities ("OCP 8-bit Floating Point Specification", 2023),
// with scales for blocks of outputs and k, for outputs, or for all.
//
// A row is 64 bytes: byte 2 · i is element i, byte 2 · i + 1 element 32 + i.  A code shifted into the
// bits of a bf16 is its value · 2^-8, once 112 is added to the exponent; denormal ones are looked up.
// NaN, codes 0x7f and 0xff, must not occur.

#ifndef RAY_HETERO_FORMATS_FP8_H
#define RAY_HETERO_FORMATS_FP8_H

#include "scaled.h"

namespace ray_hetero {

class Fp8 : public Scaled {
 public:
  Fp8(std::int64_t n, std::int64_t k, std::int64_t group, ScaleType type)
      : Scaled(Format::kFp8, n, k, 2 * kRow, group, type, false, 0, 256) {}
};

}  // namespace ray_hetero

#endif

#if defined(RAY_HETERO_LEVEL) && !defined(RAY_HETERO_FORMATS_FP8_ROWS)
#define RAY_HETERO_FORMATS_FP8_ROWS

namespace ray_hetero::RAY_HETERO_LEVEL {

// Reads two rows of codes.
struct ReadFp8 {
  static constexpr const std::uint16_t* kTable = nullptr;

  RAY_HETERO_INLINE TwoRows operator()(const std::uint8_t* at) const {
    const Pairs codes[2] = {load_pairs(at), load_pairs(at + kRow)};
    TwoRows rows;
    e4m3_pairs(codes, rows.left, rows.right);
    return rows;
  }
};

using Fp8Rows = ScaledRows<CodeRows<ReadFp8, 2 * kRow>>;

}  // namespace ray_hetero::RAY_HETERO_LEVEL

#endif

#ifdef RAY_HETERO_PYTHON

namespace ray_hetero {

inline void bind(pybind11::module_& module, const Fp8*) {
  bind_scaled<Fp8>(module, "Fp8", "Floats of eight bits, E4M3, with scales.");
}

}  // namespace ray_hetero

#endif

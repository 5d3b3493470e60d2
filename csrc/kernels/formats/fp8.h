// Floats of eight bits, E4M3 without infinities ("OCP 8-bit Floating Point Specification", 2023),
// with scales for blocks of outputs and k, for outputs, or for all.
//
// A row is 64 bytes: byte 2 · i is element i, byte 2 · i + 1 element 32 + i.  A code shifted into the
// bits of a float16 is its value · 2^-8, denormal ones included.  NaN, codes 0x7f and 0xff, must not
// occur.

#ifndef RAY_HETERO_FORMATS_FP8_H
#define RAY_HETERO_FORMATS_FP8_H

#include "scaled.h"

namespace ray_hetero {

class Fp8 : public Scaled {
 public:
  static constexpr float kZero = 0, kFactor = 256;

  Fp8(std::int64_t n, std::int64_t k, std::int64_t group, ScaleType type)
      : Scaled(Format::kFp8, n, k, 2 * kRow, group, type, false) {}
};

}  // namespace ray_hetero

#endif

#ifdef RAY_HETERO_LEVEL

namespace ray_hetero::RAY_HETERO_LEVEL {

// Reads rows of a block, two at a time.
class Fp8Rows : public ScaledRows<Fp8, 2 * kRow> {
 public:
  RAY_HETERO_INLINE explicit Fp8Rows(const Stretch& stretch) : ScaledRows(stretch) {}

  RAY_HETERO_INLINE TwoRows next() {
    const std::uint8_t* at = advance();
    TwoRows rows;
    for (int row = 0; row < 2; ++row) {
      const Pairs codes = load_pairs(at + row * kRow);
      const Pairs even = even_bytes_as_halves(codes), odd = odd_bytes_as_halves(codes);
      rows.left[row] = rounded_pairs(scaled<0>(widened_halves<0>(even)),
                                     scaled<1>(widened_halves<1>(even)));
      rows.right[row] = rounded_pairs(scaled<2>(widened_halves<0>(odd)),
                                      scaled<3>(widened_halves<1>(odd)));
    }
    return rows;
  }
};

}  // namespace ray_hetero::RAY_HETERO_LEVEL

#endif

#ifdef RAY_HETERO_PYTHON

namespace ray_hetero {

inline void bind(pybind11::module_& module, const Fp8*) {
  bind_scaled<Fp8>(module, "Fp8", "Floats of eight bits, E4M3, with scales.");
}

}  // namespace ray_hetero

#endif

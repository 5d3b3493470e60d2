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
class Fp8Rows {
 public:
  static constexpr std::int64_t kPairBytes = 2 * kRow;
  static constexpr bool kIsExpanded = false, kIsCostly = true;

  RAY_HETERO_INLINE explicit Fp8Rows(const Stretch& stretch)
      : at_(stretch.data), scales_(stretch) {}

  RAY_HETERO_INLINE const std::uint8_t* at() const { return at_; }

  RAY_HETERO_INLINE TwoRows next() {
    scales_.advance();
    TwoRows rows;
    for (int row = 0; row < 2; ++row) {
      const Pairs codes = load_pairs(at_ + row * kRow);
      const Pairs even = even_bytes_as_halves(codes), odd = odd_bytes_as_halves(codes);
      rows.left[row] = rounded_pairs(value<0>(widened_halves<0>(even)),
                                     value<1>(widened_halves<1>(even)));
      rows.right[row] = rounded_pairs(value<2>(widened_halves<0>(odd)),
                                      value<3>(widened_halves<1>(odd)));
    }
    at_ += kPairBytes;
    return rows;
  }

 private:
  template <int kQuarter>
  RAY_HETERO_INLINE Floats value(Floats code) const {
    return times(code, scales_.scales.of[kQuarter]);
  }

  const std::uint8_t* at_;
  Scales<Fp8> scales_;
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

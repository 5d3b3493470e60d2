// Floats of four bits, E2M1 ("OCP Microscaling Formats (MX) Specification v1.0", 2023), in groups.
//
// Rows lie as those of int4.h.

#ifndef RAY_HETERO_FORMATS_FP4_H
#define RAY_HETERO_FORMATS_FP4_H

#include "scaled.h"

namespace ray_hetero {

constexpr float kFp4Values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                  -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

class Fp4 : public Scaled {
 public:
  static constexpr float kZero = 0, kFactor = 1;

  Fp4(std::int64_t n, std::int64_t k, std::int64_t group, ScaleType type, float factor)
      : Scaled(Format::kFp4, n, k, kRow, group, type, false, factor) {}
};

}  // namespace ray_hetero

#endif

#ifdef RAY_HETERO_LEVEL

namespace ray_hetero::RAY_HETERO_LEVEL {

// Reads rows of a block, two at a time.
class Fp4Rows {
 public:
  static constexpr std::int64_t kPairBytes = kRow;
  static constexpr bool kIsExpanded = false, kIsCostly = true;

  RAY_HETERO_INLINE explicit Fp4Rows(const Stretch& stretch)
      : at_(stretch.data), values_(load_floats(kFp4Values)), scales_(stretch) {}

  RAY_HETERO_INLINE const std::uint8_t* at() const { return at_; }

  RAY_HETERO_INLINE TwoRows next() {
    scales_.advance();
    const Pairs codes = load_pairs(at_);
    at_ += kPairBytes;
    TwoRows rows;
    rows.left[0] = rounded_pairs(value<0, 0>(codes), value<0, 1>(codes));
    rows.right[0] = rounded_pairs(value<0, 2>(codes), value<0, 3>(codes));
    rows.left[1] = rounded_pairs(value<1, 0>(codes), value<1, 1>(codes));
    rows.right[1] = rounded_pairs(value<1, 2>(codes), value<1, 3>(codes));
    return rows;
  }

 private:
  template <int kWhich, int kQuarter>
  RAY_HETERO_INLINE Floats value(Pairs codes) const {
    const Floats found = looked_up_floats<16 * kWhich + 4 * kQuarter>(values_, codes);
    return times(found, scales_.scales.of[kQuarter]);
  }

  const std::uint8_t* at_;
  const Floats values_;
  Scales<Fp4> scales_;
};

}  // namespace ray_hetero::RAY_HETERO_LEVEL

#endif

#ifdef RAY_HETERO_PYTHON

namespace ray_hetero {

inline void bind(pybind11::module_& module, const Fp4*) {
  bind_scaled<Fp4, float>(module, "Fp4", "Floats of four bits, E2M1, with scales.",
                           pybind11::arg("factor"));
}

}  // namespace ray_hetero

#endif

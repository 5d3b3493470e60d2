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
class Fp4Rows : public NibbleRows<Fp4Rows, Fp4> {
 public:
  RAY_HETERO_INLINE explicit Fp4Rows(const Stretch& stretch)
      : NibbleRows(stretch), values_(load_floats(kFp4Values)) {}

  template <int kShift, int kQuarter>
  RAY_HETERO_INLINE Floats value(Pairs codes) const {
    return scaled<kQuarter>(looked_up_floats<kShift>(values_, codes));
  }

 private:
  const Floats values_;
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

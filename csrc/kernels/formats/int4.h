// Integers of four bits in groups, as compressed-tensors (W4A16), GPTQ and AWQ have them.
//
// A code is 0 to 15, its zero point 8 unless there are zero points.  Two rows are 64 bytes: a lane of
// 32 bits holds, from its lowest bits on, elements lane, 16 + lane, 32 + lane and 48 + lane of the
// first row, then those of the second.

#ifndef RAY_HETERO_FORMATS_INT4_H
#define RAY_HETERO_FORMATS_INT4_H

#include "scaled.h"

namespace ray_hetero {

class Int4 : public Scaled {
 public:
  static constexpr float kZero = 8, kFactor = 1;

  Int4(std::int64_t n, std::int64_t k, std::int64_t group, ScaleType type, bool has_zeros)
      : Scaled(Format::kInt4, n, k, kRow, group, type, has_zeros) {}
};

}  // namespace ray_hetero

#endif

#ifdef RAY_HETERO_LEVEL

namespace ray_hetero::RAY_HETERO_LEVEL {

// Reads rows of a block, two at a time.
class Int4Rows : public NibbleRows<Int4Rows, Int4> {
 public:
  RAY_HETERO_INLINE explicit Int4Rows(const Stretch& stretch) : NibbleRows(stretch) {}

  template <int kShift, int kQuarter>
  RAY_HETERO_INLINE Floats value(Pairs codes) const {
    return scaled_code<kQuarter>(large_codes<kShift, 4>(codes));
  }
};

}  // namespace ray_hetero::RAY_HETERO_LEVEL

#endif

#ifdef RAY_HETERO_PYTHON

namespace ray_hetero {

inline void bind(pybind11::module_& module, const Int4*) {
  bind_scaled<Int4, bool>(module, "Int4", "Integers of four bits with scales.",
                          pybind11::arg("has_zeros"));
}

}  // namespace ray_hetero

#endif

// Integers of eight bits: a code is 0 to 255, its zero point 128 unless there are zero points.
//
// A row is 64 bytes: a lane of 32 bits holds, from its lowest byte on, elements lane, 16 + lane,
// 32 + lane and 48 + lane.

#ifndef RAY_HETERO_FORMATS_INT8_H
#define RAY_HETERO_FORMATS_INT8_H

#include "scaled.h"

namespace ray_hetero {

class Int8 : public Scaled {
 public:
  static constexpr float kZero = 128, kFactor = 1;

  Int8(std::int64_t n, std::int64_t k, std::int64_t group, ScaleType type, bool has_zeros)
      : Scaled(Format::kInt8, n, k, 2 * kRow, group, type, has_zeros) {}
};

}  // namespace ray_hetero

#endif

#ifdef RAY_HETERO_LEVEL

namespace ray_hetero::RAY_HETERO_LEVEL {

// Reads rows of a block, two at a time.
class Int8Rows : public ScaledRows<Int8, 2 * kRow> {
 public:
  RAY_HETERO_INLINE explicit Int8Rows(const Stretch& stretch) : ScaledRows(stretch) {}

  RAY_HETERO_INLINE TwoRows next() {
    const std::uint8_t* at = advance();
    TwoRows rows;
    for (int row = 0; row < 2; ++row) {
      const Pairs codes = load_pairs(at + row * kRow);
      rows.left[row] = rounded_pairs(value<0>(codes), value<1>(codes));
      rows.right[row] = rounded_pairs(value<2>(codes), value<3>(codes));
    }
    return rows;
  }

 private:
  template <int kQuarter>
  RAY_HETERO_INLINE Floats value(Pairs codes) const {
    return scaled_code<kQuarter>(large_codes<8 * kQuarter, 8>(codes));
  }
};

}  // namespace ray_hetero::RAY_HETERO_LEVEL

#endif

#ifdef RAY_HETERO_PYTHON

namespace ray_hetero {

inline void bind(pybind11::module_& module, const Int8*) {
  bind_scaled<Int8, bool>(module, "Int8", "Integers of eight bits with scales.",
                          pybind11::arg("has_zeros"));
}

}  // namespace ray_hetero

#endif

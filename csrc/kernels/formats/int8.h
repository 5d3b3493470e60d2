// Integers of eight bits: a code is 0 to 255, its zero point 128 unless there are zero points.
//
// A row is 64 bytes: a lane of 32 bits holds, from its lowest byte on, the pair of elements of output
// `lane`, then that of output 16 + lane.

#ifndef RAY_HETERO_FORMATS_INT8_H
#define RAY_HETERO_FORMATS_INT8_H

#include "scaled.h"

namespace ray_hetero {

class Int8 : public Scaled {
 public:
  Int8(std::int64_t n, std::int64_t k, std::int64_t group, ScaleType type, bool has_zeros)
      : Scaled(Format::kInt8, n, k, 2 * kRow, group, type, has_zeros, 128, 1) {}
};

}  // namespace ray_hetero

#endif

#if defined(RAY_HETERO_LEVEL) && !defined(RAY_HETERO_FORMATS_INT8_ROWS)
#define RAY_HETERO_FORMATS_INT8_ROWS

namespace ray_hetero::RAY_HETERO_LEVEL {

// Reads two rows of codes.
struct ReadInt8 {
  static constexpr const std::uint16_t* kTable = nullptr;

  RAY_HETERO_INLINE TwoRows operator()(const std::uint8_t* at) const {
    TwoRows rows;
    for (int row = 0; row < 2; ++row) {
      const Pairs codes = load_pairs(at + row * kRow);
      rows.left[row] = exact_pairs(value<0>(codes), value<8>(codes));
      rows.right[row] = exact_pairs(value<16>(codes), value<24>(codes));
    }
    return rows;
  }

 private:
  // -128 to 127, which bf16 has.
  template <int kShift>
  static RAY_HETERO_INLINE Floats value(Pairs codes) {
    return minus(large_codes<kShift, 8>(codes), spread(kLargeCodes + 128));
  }
};

using Int8Rows = ScaledRows<CodeRows<ReadInt8, 2 * kRow>, true>;

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

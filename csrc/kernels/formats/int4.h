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
class Int4Rows {
 public:
  static constexpr std::int64_t kPairBytes = kRow;
  static constexpr bool kIsExpanded = false, kIsCostly = true;

  RAY_HETERO_INLINE explicit Int4Rows(const Stretch& stretch)
      : at_(stretch.data), scales_(stretch) {}

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
    const Floats code = large_codes<16 * kWhich + 4 * kQuarter, 4>(codes);
    return times(minus(code, scales_.zeros.of[kQuarter]), scales_.scales.of[kQuarter]);
  }

  const std::uint8_t* at_;
  Scales<Int4> scales_;
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

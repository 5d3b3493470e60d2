// Integers of four bits in groups, as compressed-tensors (W4A16), GPTQ and AWQ have them.
//
// A code is 0 to 15, its zero point 8 unless there are zero points.  Two rows are 64 bytes: a word of
// 16 bits holds, from its lowest bits on, elements word and 32 + word of the first row, then those
// of the second.

#ifndef RAY_HETERO_FORMATS_INT4_H
#define RAY_HETERO_FORMATS_INT4_H

#include "scaled.h"

namespace ray_hetero {

class Int4 : public Scaled {
 public:
  Int4(std::int64_t n, std::int64_t k, std::int64_t group, ScaleType type, bool has_zeros)
      : Scaled(Format::kInt4, n, k, kRow, group, type, has_zeros, 8, 1) {}
};

// -8 to 7 in bf16, by code.
constexpr std::uint16_t kInt4Values[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
                                           0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040,
                                           0x4080, 0x40a0, 0x40c0, 0x40e0};

}  // namespace ray_hetero

#endif

#if defined(RAY_HETERO_LEVEL) && !defined(RAY_HETERO_FORMATS_INT4_ROWS)
#define RAY_HETERO_FORMATS_INT4_ROWS

namespace ray_hetero::RAY_HETERO_LEVEL {

using Int4Rows = ScaledRows<CodeRows<ReadNibbles<kInt4Values>, kRow>, true>;

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

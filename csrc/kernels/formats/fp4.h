// Floats of four bits, E2M1 ("OCP Microscaling Formats (MX) Specification v1.0", 2023), in groups.
//
// Rows lie as those of int4.h.

#ifndef RAY_HETERO_FORMATS_FP4_H
#define RAY_HETERO_FORMATS_FP4_H

#include "scaled.h"

namespace ray_hetero {

// 0, 0.5, 1, 1.5, 2, 3, 4 and 6 in bf16, then with the sign.
constexpr std::uint16_t kFp4Values[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
                                          0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0,
                                          0xc000, 0xc040, 0xc080, 0xc0c0};

class Fp4 : public Scaled {
 public:
  Fp4(std::int64_t n, std::int64_t k, std::int64_t group, ScaleType type, float factor)
      : Scaled(Format::kFp4, n, k, kRow, group, type, false, 0, 1, factor) {}
};

}  // namespace ray_hetero

#endif

#if defined(RAY_HETERO_LEVEL) && !defined(RAY_HETERO_FORMATS_FP4_ROWS)
#define RAY_HETERO_FORMATS_FP4_ROWS

namespace ray_hetero::RAY_HETERO_LEVEL {

using Fp4Rows = ScaledRows<CodeRows<ReadNibbles<kFp4Values>, kRow>>;

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

// Packed weights: rows in bf16 as they are multiplied, [N / 32][K / 2][32][2], the layout of vLLM's
// packed kernels.

#ifndef RAY_HETERO_FORMATS_PACKED_H
#define RAY_HETERO_FORMATS_PACKED_H

#include "encoding.h"

#include <cstdint>

namespace ray_hetero {

class Packed : public Encoding {
 public:
  using Encoding::Encoding;

  BlockRows block(const std::uint8_t* data, std::int64_t block) const override {
    return {Format::kPacked, 2 * kRowBytes, data + block * pairs() * kRowBytes};
  }
};

}  // namespace ray_hetero

#endif

#if defined(RAY_HETERO_LEVEL) && !defined(RAY_HETERO_FORMATS_PACKED_ROWS)
#define RAY_HETERO_FORMATS_PACKED_ROWS

#include "../sums.h"
#include "../this_level.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

// Reads rows of a block, two at a time.
class PackedRows {
 public:
  static constexpr std::int64_t kPairBytes = 2 * kRowBytes;
  static constexpr bool kIsExpanded = true, kHasCodes = false;

  RAY_HETERO_INLINE explicit PackedRows(const Stretch& stretch) : at_(stretch.data) {}

  RAY_HETERO_INLINE const std::uint8_t* at() const { return at_; }

  RAY_HETERO_INLINE TwoRows next() {
    const std::uint8_t* next = at_ + kRowBytes;
    const TwoRows two{{load_pairs(at_), load_pairs(next)},
                      {load_pairs(at_ + kRowBytes / 2), load_pairs(next + kRowBytes / 2)}};
    at_ += kPairBytes;
    return two;
  }

 private:
  const std::uint8_t* at_;
};

}  // namespace ray_hetero::RAY_HETERO_LEVEL

#endif

#ifdef RAY_HETERO_PYTHON

namespace ray_hetero {

inline void bind(pybind11::module_& module, const Packed*) {
  pybind11::class_<Packed, Encoding>(module, "Packed", "Rows [N / 32][K / 2][32][2], bf16.")
      .def(pybind11::init([](std::int64_t n, std::int64_t k) {
             check_shape(n, k);
             return Packed(n, k);
           }),
           pybind11::arg("n"), pybind11::arg("k"),
           "Raises ValueError: shapes that the layout cannot hold.");
}

}  // namespace ray_hetero

#endif

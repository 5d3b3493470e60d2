// Weights in their formats, and products with them.

#include "arguments.h"

#include <pybind11/numpy.h>

namespace ray_hetero {

inline void check_shape(std::int64_t n, std::int64_t k) {
  if (n % kBlock != 0 || k % (2 * kTile) != 0 || n <= 0 || k <= 0) {
    throw pybind11::value_error("expected N and K in multiples of 32, got " + std::to_string(n) +
                                " and " + std::to_string(k));
  }
}

}  // namespace ray_hetero

// The formats' faces.
#define RAY_HETERO_PYTHON
#include "../formats/all.h"
#undef RAY_HETERO_PYTHON

namespace ray_hetero {
namespace {

void linear(std::uintptr_t x, std::int64_t stride, std::uintptr_t w, const Encoding& encoding,
            std::uintptr_t bias, std::uintptr_t y, std::int64_t m, const Level& level) {
  if (m < 0) throw py::value_error("expected no negative number of tokens");
  if (m > 1 && stride < encoding.k()) {
    throw py::value_error("expected a stride of at least " + std::to_string(encoding.k()) +
                          " elements, got " + std::to_string(stride));
  }
  const Task task{pointer<const std::uint16_t>(x), {pointer<const std::uint8_t>(w), &encoding},
                  pointer<const float>(bias), pointer<std::uint16_t>(y), m, stride};
  py::gil_scoped_release release;
  level.kernels.linear(task);
}

}  // namespace

void bind_weights(py::module_& module) {
  py::class_<Encoding>(module, "Encoding", "What belongs to a weight [N, K] beside its rows.")
      .def_property_readonly("shape", [](const Encoding& encoding) {
        return std::pair(encoding.n(), encoding.k());
      });
#define RAY_HETERO_FORMAT(name) bind(module, static_cast<const name*>(nullptr));
  RAY_HETERO_FORMATS(RAY_HETERO_FORMAT)
#undef RAY_HETERO_FORMAT

  module.def("linear", &linear, py::kw_only(), py::arg("x"), py::arg("stride"), py::arg("w"),
             py::arg("encoding"), py::arg("bias"), py::arg("y"), py::arg("m"), py::arg("level"),
             "y [m, N] = x [m, K] · Wᵀ + bias, all bf16 but the bias (float32), given by address.\n\n"
             "`stride` is elements between tokens of x; `encoding` says what w is; bias may be 0.\n"
             "Uses the threads of the OpenMP runtime that the process has.\n"
             "Raises ValueError: a negative number of tokens, a stride below K.");
  module.def(
      "expand",
      [](std::uintptr_t w, const Encoding& encoding, std::uintptr_t packed, const Level& level) {
        py::gil_scoped_release release;
        level.kernels.expand({pointer<const std::uint8_t>(w), &encoding},
                             pointer<std::uint16_t>(packed));
      },
      py::kw_only(), py::arg("w"), py::arg("encoding"), py::arg("packed"), py::arg("level"),
      "Write any weight as packed rows; both by address.");
}

}  // namespace ray_hetero

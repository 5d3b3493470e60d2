// Python's face of streaming_linear.h; ray_hetero/streaming_linear.py is the typed one.

#include "streaming_linear.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace {

template <typename T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void linear(std::uintptr_t x, std::int64_t stride, std::uintptr_t w, std::uintptr_t bias,
            std::uintptr_t y, std::int64_t m, std::int64_t n, std::int64_t k, bool use_amx) {
  if (!ray_hetero::has_bf16()) throw py::value_error("this processor has no AVX-512-BF16");
  const bool fits = n % ray_hetero::kBlock == 0 && k % (2 * ray_hetero::kTile) == 0;
  if (!fits || m < 0 || n <= 0 || k <= 0) {
    throw py::value_error("expected N and K in multiples of 32");
  }
  const ray_hetero::Task task{pointer<const std::uint16_t>(x),
                              pointer<const std::uint16_t>(w),
                              pointer<const float>(bias),
                              pointer<std::uint16_t>(y),
                              m,
                              n,
                              k / 2,
                              stride,
                              use_amx};
  py::gil_scoped_release release;
  ray_hetero::run(task);
}

}  // namespace

PYBIND11_MODULE(_streaming_linear, module) {
  module.doc() = "Linear layers in bf16; few tokens at the bandwidth of the socket.";
  module.def("has_bf16", &ray_hetero::has_bf16, "Whether this processor has AVX-512-BF16.");
  module.def("has_amx", &ray_hetero::has_amx,
             "Whether this process may use AMX-BF16; asks the kernel for it.");
  module.def("linear", &linear, py::arg("x"), py::arg("stride"), py::arg("w"), py::arg("bias"),
             py::arg("y"), py::arg("m"), py::arg("n"), py::arg("k"), py::arg("use_amx"),
             "y [m, n] = x [m, k] · Wᵀ + bias, all bf16 but the bias (float32), given by address.\n\n"
             "`stride` is elements between tokens of x; w is packed as [n / 32][k / 2][32][2];\n"
             "bias may be 0.  Uses the threads of the OpenMP runtime that the process has.\n"
             "Raises ValueError: shapes that the layout cannot hold, or a processor without\n"
             "AVX-512-BF16.");
}

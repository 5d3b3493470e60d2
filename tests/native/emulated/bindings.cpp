// Levels of emulated instructions, for the functions of the kernels' own module: that one has to be
// there before, it knows Level and all else that is handed over.

#include "levels.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace ray_hetero {
namespace emulated_avx512 {
const Kernels& kernels();
}
namespace emulated_avx512_bf16 {
const Kernels& kernels();
}
namespace emulated_amx {
const Kernels& kernels();
}
namespace emulated_half_avx512 {
const Kernels& kernels();
}

namespace {

std::vector<Level> emulated_levels() {
#if defined(__x86_64__)
  if (!has_avx2()) return {};
#endif
  return {{"emulated_avx512", emulated_avx512::kernels()},
          {"emulated_avx512_bf16", emulated_avx512_bf16::kernels()},
          {"emulated_amx", emulated_amx::kernels()}};
}

std::vector<Level> emulated_half_levels() {
#if defined(__x86_64__)
  if (!has_avx2()) return {};
#endif
  return {{"emulated_half_avx512", emulated_half_avx512::kernels()}};
}

}  // namespace
}  // namespace ray_hetero

PYBIND11_MODULE(_emulated_levels, module) {
  module.doc() = "Levels whose instructions are emulated, for tests.";
  module.def("levels", &ray_hetero::emulated_levels,
             "Those that this processor can emulate: on x86 it has to have AVX2 with FMA.");
  module.def("half_levels", &ray_hetero::emulated_half_levels, "The same of those in float16.");
}

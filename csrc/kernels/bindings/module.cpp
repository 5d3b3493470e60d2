// Python's face of the headers of csrc/kernels; the typed ones are ray_hetero/kernels/formats/,
// streaming_linear.py, post_attention.py, decoder_layers.py and decode_step.py.

#include "arguments.h"

namespace ray_hetero {
namespace {

Level level(const std::string& name) {
  std::string names;
  for (const Level& one : levels()) {
    if (one.name == name) return one;
    names += (names.empty() ? "" : ", ") + std::string(one.name);
  }
  throw py::value_error("expected a level that this processor has (" + names + "), got " + name);
}

void bind_levels(py::module_& module) {
  py::class_<Level>(module, "Level",
                    "A set of instructions that kernels are compiled for, and this process may use.")
      .def_property_readonly("name", [](const Level& level) { return level.name; })
      .def_property_readonly(
          "has_tiles", [](const Level& level) { return level.kernels.has_tiles; },
          "Whether tokens are multiplied as tiles, up to FEW_TOKENS of them at once.")
      .def("__repr__", [](const Level& level) { return "Level " + std::string(level.name); });
  module.def("levels", &levels,
             "Levels that this process may use, from those for tests to the best.\n\n"
             "\"portable\" is plain C++, \"software_tiles\" the same with AMX's tiles in software.");
  module.def("half_levels", &half_levels,
             "The same of levels that compute weights and activations in float16, in the place of bf16\n"
             "wherever an argument is said to be that.  Weights have to be packed.");
  module.def("level", &level, py::arg("name"),
             "The level of a name.  Raises ValueError: this process has none.");
}

}  // namespace
}  // namespace ray_hetero

PYBIND11_MODULE(_streaming_linear, module) {
  module.doc() = "Linear layers in bf16; few tokens at the bandwidth of the socket.";
  // Up to which products do nothing but read weights, with AMX.
  module.attr("FEW_TOKENS") = ray_hetero::kFewTokens;
  // Most of a decode step in one call.
  module.attr("STEP_TOKENS") = ray_hetero::kStepTokens;
  // Each after those whose types it takes.
  ray_hetero::bind_levels(module);
  ray_hetero::bind_weights(module);
  ray_hetero::bind_arrange(module);
  ray_hetero::bind_experts(module);
  ray_hetero::bind_rank_sums(module);
  ray_hetero::bind_post_attention(module);
  ray_hetero::bind_decode_step(module);
  ray_hetero::bind_latent_layer(module);
  ray_hetero::bind_gated_delta_layer(module);
  ray_hetero::bind_mamba2_mixer(module);
}

// Mixers of Mamba 2.

#include "arguments.h"

namespace ray_hetero {
namespace {

using AsHeads = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

void check(const Mamba2Mixer& mixer) {
  const Mamba2Heads& heads = mixer.heads;
  if (heads.groups <= 0 || heads.heads <= 0 || heads.heads % heads.groups != 0) {
    throw py::value_error("expected as many heads in each group");
  }
  if (heads.value <= 0 || heads.value % kLanes != 0 || heads.state <= 0 ||
      heads.state % kLanes != 0) {
    throw py::value_error("expected values and states in multiples of 16");
  }
  if (mixer.norm_groups <= 0 || heads.values() % (mixer.norm_groups * kLanes) != 0) {
    throw py::value_error("expected groups of the norm in multiples of 16");
  }
  if (mixer.tap_count < 2) throw py::value_error("expected at least two taps of the convolution");
  const bool fits = mixer.input.w.n() >= heads.inputs() &&
                    mixer.output.w.k() == heads.values() &&
                    mixer.output.w.n() == mixer.input.w.k();
  if (!fits) throw py::value_error("expected the mixer's inputs and outputs to fit together");
  const std::int64_t sums = kStepTokens * mixer.output.w.n();
  if (mixer.sums != nullptr && mixer.sums->elements() < sums) {
    throw py::value_error("expected room for " + std::to_string(sums) + " sums, got " +
                          std::to_string(mixer.sums->elements()));
  }
}

Mamba2Mixer mamba2_mixer(const AsHeads& given, const AsLinear& input, std::uintptr_t factors,
                         std::uintptr_t taps, std::int64_t tap_count, std::uintptr_t tap_bias,
                         std::uintptr_t rates, std::uintptr_t step_bias, std::uintptr_t skips,
                         std::uintptr_t norm, std::int64_t norm_groups, float epsilon,
                         const AsLinear& output, RankSums* sums) {
  const auto& [heads, groups, value, state] = given;
  Mamba2Mixer made{{heads, groups, value, state},
                   as_linear(input),
                   pointer<const std::uint16_t>(factors),
                   pointer<const std::uint16_t>(taps),
                   tap_count,
                   pointer<const float>(tap_bias),
                   pointer<const float>(rates),
                   pointer<const float>(step_bias),
                   pointer<const float>(skips),
                   pointer<const std::uint16_t>(norm),
                   norm_groups,
                   epsilon,
                   as_linear(output),
                   sums};
  check(made);
  return made;
}

void run_mamba2_mixer(const Mamba2Mixer& mixer,
                      const AsInputs& inputs, const AsStates& heads,
                      std::int64_t states, std::uintptr_t numbers, std::int64_t m,
                      std::uintptr_t x, std::uintptr_t y, const Level& level) {
  const LinearStates made = as_states(inputs, heads, states, numbers, m);
  Step step;
  step.hidden = pointer<const std::uint16_t>(x);
  step.y = pointer<std::uint16_t>(y);
  py::gil_scoped_release release;
  level.kernels.mamba2_mixer(mixer, made, step);
}

}  // namespace

void bind_mamba2_mixer(py::module_& module) {
  py::class_<Mamba2Mixer>(module, "Mamba2Mixer",
                          "A mixer of Mamba 2, from the product of its input to that of its output.")
      .def(py::init(&mamba2_mixer), py::kw_only(), py::arg("heads"), py::arg("input"),
           py::arg("factors"), py::arg("taps"), py::arg("tap_count"), py::arg("tap_bias"),
           py::arg("rates"), py::arg("step_bias"), py::arg("skips"), py::arg("norm"),
           py::arg("norm_groups"), py::arg("epsilon"), py::arg("output"),
           py::arg("sums") = nullptr,
           "`heads` is heads, their groups, elements of a value, and of a key, a query or a row of the\n"
           "state.  Layers as in PostAttention, without adapters: `input` gives output gates, values,\n"
           "keys, queries, and a step of each head; more outputs are not read.  By address: `factors`\n"
           "[outputs of input], bf16, or 0; `taps` [tap_count, channels], bf16, the last of the token\n"
           "itself; `tap_bias` [channels], float32, or 0; `rates`, `step_bias` and `skips` [heads],\n"
           "float32; `norm` [heads · value], bf16, or 0 for no norm.  `sums` are those of the group whose\n"
           "ranks have parts of the heads, or None.\n"
           "What all this points at must outlive it.\n"
           "Raises ValueError: shapes that do not fit together, or are no such multiples.")
      .def("run", &run_mamba2_mixer, py::kw_only(), py::arg("inputs"), py::arg("heads"),
           py::arg("states"), py::arg("numbers"), py::arg("m"), py::arg("x"), py::arg("y"),
           py::arg("level"),
           "A decode step: x → y, both [m, N], bf16, by address.  `inputs` is (address of\n"
           "[states, tap_count - 1, channels], bf16, stride of states), `heads` (address of\n"
           "[states, heads, value, state], stride of states, whether that is float32 and not bf16);\n"
           "`numbers` [m], int32, are the tokens' states, 0 or less for a token without one.\n"
           "Raises ValueError: a state that there is not.");
}

}  // namespace ray_hetero

// Layers with a Gated DeltaNet.

#include "arguments.h"

namespace ray_hetero {
namespace {

using AsHeads = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, bool>;

void check(const GatedDeltaLayer& layer) {
  const GatedDeltaHeads& heads = layer.heads;
  if (heads.key_heads <= 0 || heads.value_heads <= 0 || heads.value_heads % heads.key_heads != 0) {
    throw py::value_error("expected as many value heads for each key head");
  }
  if (heads.key <= 0 || heads.key % kLanes != 0 || heads.value <= 0 ||
      heads.value % (2 * kLanes) != 0) {
    throw py::value_error("expected keys in multiples of 16, and values in multiples of 32");
  }
  if (layer.tap_count < 2) throw py::value_error("expected at least two taps of the convolution");
  const std::int64_t hidden = layer.input.w.k();
  const bool fits = layer.input.w.n() == heads.inputs() && layer.gates.w.k() == hidden &&
                    layer.gates.w.n() >= 2 * heads.value_heads &&
                    layer.behind.output.w.k() == heads.values() &&
                    layer.behind.output.w.n() == hidden;
  if (!fits) throw py::value_error("expected the layers' inputs and outputs to fit together");
  if (layer.behind.next) throw py::value_error("expected no layer behind");
}

GatedDeltaLayer gated_delta_layer(const AsHeads& given, const AsNorm& norm, const AsLinear& input,
                                  const AsLinear& gates, std::uintptr_t taps,
                                  std::int64_t tap_count, std::uintptr_t rates,
                                  std::uintptr_t rate_bias, std::uintptr_t head_norm,
                                  float epsilon, bool is_sigmoid, const PostAttention& behind) {
  const auto& [key_heads, value_heads, key, value, is_by_key_head] = given;
  GatedDeltaLayer made{{key_heads, value_heads, key, value, is_by_key_head},
                       as_norm(norm),
                       as_linear(input),
                       as_linear(gates),
                       pointer<const std::uint16_t>(taps),
                       tap_count,
                       pointer<const float>(rates),
                       pointer<const float>(rate_bias),
                       pointer<const float>(head_norm),
                       epsilon,
                       is_sigmoid,
                       behind};
  check(made);
  return made;
}

void run_gated_delta_layer(const GatedDeltaLayer& layer,
                           const AsInputs& inputs, const AsStates& heads,
                           std::int64_t states, std::uintptr_t numbers, std::int64_t m,
                           std::uintptr_t hidden, std::uintptr_t residual, std::uintptr_t y,
                           std::uintptr_t sum, const Level& level) {
  const LinearStates made = as_states(inputs, heads, states, numbers, m);
  const Step step{pointer<const std::uint16_t>(hidden), pointer<const std::uint16_t>(residual),
                  pointer<std::uint16_t>(y), pointer<std::uint16_t>(sum), nullptr};
  py::gil_scoped_release release;
  level.kernels.gated_delta_layer(layer, made, step);
}

}  // namespace

void bind_gated_delta_layer(py::module_& module) {
  py::class_<GatedDeltaLayer>(module, "GatedDeltaLayer",
                              "A layer with a Gated DeltaNet, up to the norm before its experts, or\n"
                              "with its MLP.")
      .def(py::init(&gated_delta_layer), py::kw_only(), py::arg("heads"), py::arg("norm"),
           py::arg("input"), py::arg("gates"), py::arg("taps"), py::arg("tap_count"),
           py::arg("rates"), py::arg("rate_bias"), py::arg("head_norm"), py::arg("epsilon"),
           py::arg("is_sigmoid"), py::arg("behind"),
           "`heads` is key heads, value heads, elements of a key, of a value, and whether products\n"
           "give what belongs to a key head together.  Norms and layers as in PostAttention, without\n"
           "adapters: `input` gives queries, keys, values and output gates, `gates` a write gate and a\n"
           "decay for each value head.  By address: `taps` [tap_count, channels], bf16, the last of\n"
           "the token itself; `rates` and `rate_bias` [value heads] and `head_norm` [value], float32.\n"
           "`behind` is without a layer that follows.  What all this points at must outlive it.\n"
           "Raises ValueError: shapes that do not fit together, or are no such multiples.")
      .def("run", &run_gated_delta_layer, py::kw_only(), py::arg("inputs"), py::arg("heads"),
           py::arg("states"), py::arg("numbers"), py::arg("m"), py::arg("hidden"),
           py::arg("residual"), py::arg("y"), py::arg("sum"), py::arg("level"),
           "A decode step: hidden, residual (or 0) → y, what is still to be added to sum or what the\n"
           "norm behind the output gives where there is no MLP, and sum, all [m, N], bf16, by address.\n"
           "`inputs` is (address of [states, tap_count - 1, channels], bf16, stride of states), `heads`\n"
           "(address of [states, value heads, key, value], stride of states, whether that is float32\n"
           "and not bf16); `numbers` [m], int32, are the tokens' states, 0 or less for a token without.\n"
           "Raises ValueError: a state that there is not.");
}

}  // namespace ray_hetero

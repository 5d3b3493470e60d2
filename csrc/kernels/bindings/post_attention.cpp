// What a decoder layer computes from one attention to the next, with adapters.

#include "arguments.h"

namespace ray_hetero {
namespace {

Adapters adapters(std::int64_t slots, std::int64_t rank, std::int64_t k,
                  const std::vector<std::tuple<std::uintptr_t, std::uintptr_t, std::int64_t>>& all) {
  if (slots <= 0 || rank <= 0 || all.empty()) {
    throw py::value_error("expected at least one slot, one rank and one slice of outputs");
  }
  Adapters made{slots, rank, k, {}};
  for (const auto& [a, b, outputs] : all) {
    if (outputs <= 0 || outputs % kLanes != 0) {
      throw py::value_error("expected outputs in multiples of 16, got " + std::to_string(outputs));
    }
    made.slices.push_back({pointer<const std::uint16_t>(a), pointer<const std::uint16_t>(b),
                           outputs});
  }
  return made;
}

PostAttention post_attention(const AsLinear& output, const std::optional<AsNorm>& output_norm,
                             const AsNorm& norm, const std::optional<AsLinear>& gate_up,
                             const std::string& activation, const std::optional<AsLinear>& down,
                             const std::optional<AsNorm>& down_norm, float multiplier,
                             bool is_parallel,
                             const std::optional<std::tuple<AsNorm, AsLinear>>& next,
                             RankSums* sums) {
  PostAttention made;
  made.sums = sums;
  made.output = as_linear(output);
  made.output_norm = as_optional_norm(output_norm);
  made.norm = as_norm(norm);
  made.activation = named<MlpActivation>("an activation", activation,
                                         {{"silu", MlpActivation::kSilu},
                                          {"gelu", MlpActivation::kGelu},
                                          {"gelu_tanh", MlpActivation::kGeluTanh},
                                          {"relu", MlpActivation::kRelu},
                                          {"relu_squared", MlpActivation::kReluSquared}});
  made.down_norm = as_optional_norm(down_norm);
  made.multiplier = multiplier;
  made.is_parallel = is_parallel;
  if (next) made.next = {as_norm(std::get<0>(*next)), as_linear(std::get<1>(*next))};
  const std::int64_t hidden = made.output.w.n();
  if (gate_up && down) {
    made.gate_up = as_linear(*gate_up);
    made.down = as_linear(*down);
    const std::int64_t inner = made.inner();
    const bool fits = made.gate_up.w.n() == 2 * inner || made.gate_up.w.n() == inner;
    if (made.gate_up.w.k() != hidden || !fits || made.down.w.n() != hidden) {
      throw py::value_error("expected the layers' inputs and outputs to fit together");
    }
  } else if (gate_up || down || next || is_parallel) {
    throw py::value_error("expected nothing behind a norm without an MLP");
  }
  if (made.next && made.next->qkv.w.k() != hidden) {
    throw py::value_error("expected the layers' inputs and outputs to fit together");
  }
  if (is_parallel && made.output_norm) {
    throw py::value_error("expected no norm of an attention that is beside its MLP");
  }
  if (sums != nullptr && sums->elements() < kStepTokens * hidden) {
    throw py::value_error("expected room for the sums of " + std::to_string(kStepTokens) + " × " +
                          std::to_string(hidden) + " elements, got " +
                          std::to_string(sums->elements()));
  }
  return made;
}

void run_post_attention(const PostAttention& layer, std::uintptr_t attended,
                        std::uintptr_t residual, std::int64_t m, std::uintptr_t sum,
                        std::uintptr_t y, const Level& level, std::uintptr_t slots) {
  const auto of_tokens = pointer<const std::int64_t>(slots);
  check_slots(of_tokens, m, least_slots(layer));
  py::gil_scoped_release release;
  level.kernels.post_attention(layer, pointer<const std::uint16_t>(attended),
                               pointer<const std::uint16_t>(residual), m,
                               pointer<std::uint16_t>(sum), pointer<std::uint16_t>(y), of_tokens);
}

}  // namespace

void bind_post_attention(py::module_& module) {
  py::class_<Adapters>(module, "Adapters", "Low-rank adapters of a linear layer, one in each slot.")
      .def(py::init(&adapters), py::kw_only(), py::arg("slots"), py::arg("rank"), py::arg("k"),
           py::arg("slices"),
           "Slices are (address of A [slots, rank, k], of B [slots, outputs, rank], outputs), bf16,\n"
           "for neighbouring outputs of the layer.  They are read in each step, so that what is in\n"
           "a slot may change between two; they must outlive all that uses them.\n"
           "Raises ValueError: sizes of 0, outputs in no multiple of 16.");

  py::class_<PostAttention>(module, "PostAttention",
                                  "What a decoder layer computes from one attention to the next.")
      .def(py::init(&post_attention), py::kw_only(), py::arg("output"), py::arg("output_norm"),
           py::arg("norm"), py::arg("gate_up"), py::arg("activation"), py::arg("down"),
           py::arg("down_norm"), py::arg("multiplier"), py::arg("is_parallel"), py::arg("next"),
           py::arg("sums") = nullptr,
           "Layers are (address of W, of the bias or 0, its Encoding, Adapters or None); norms are (\"rms\",\n"
           "\"rms_plus_one\" or \"layer\", address of the weight, of the bias or 0, epsilon,\n"
           "whether sums are rounded first), those of what `output` and `down` give may be None;\n"
           "`activation` is silu, gelu, gelu_tanh, relu or relu_squared, of a gate if `gate_up`\n"
           "has twice as many outputs as `down` has inputs; without both the result is what `norm`\n"
           "gives; `multiplier` is of what is added to the residual; with `is_parallel` the\n"
           "MLP's norm is of the residual before the attention is added; `next` is a norm and\n"
           "a layer, or None; `sums` are those of the group whose ranks have parts of output and\n"
           "down, or None.  What all this points at must outlive it.\n"
           "Raises ValueError: shapes that do not fit together, a name that is none of these.")
      .def("run", &run_post_attention, py::arg("attended"), py::arg("residual"), py::arg("m"),
           py::arg("sum"), py::arg("y"), py::arg("level"), py::arg("slots") = 0,
           "sum [m, N], y [m, N of next or down] from attended [m, K], residual [m, N]: bf16, by\n"
           "address; `slots` [m], int64, by address, are those of each token's adapter, negative for\n"
           "none, or 0 where no token has one.\n"
           "Raises ValueError: a slot that adapters do not have.");
}

}  // namespace ray_hetero

// The routed experts of a mixture layer.

#include "../../expert_call.h"
#include "arguments.h"

namespace ray_hetero {
namespace {

const std::vector<std::pair<const char*, ExpertActivation>> kActivations = {
#define RAY_HETERO_ACTIVATION(name, says, gated) {says, ExpertActivation::k##name},
    RAY_HETERO_EXPERT_ACTIVATIONS(RAY_HETERO_ACTIVATION)
#undef RAY_HETERO_ACTIVATION
};

Experts experts(const std::vector<std::tuple<AsWeight, AsWeight>>& given,
                std::uintptr_t gate_up_bias, std::uintptr_t down_bias,
                const std::string& activation, float alpha, float beta, float limit,
                float up_limit) {
  if (given.empty()) throw py::value_error("expected at least one expert");
  Experts made{{}, pointer<const float>(gate_up_bias), pointer<const float>(down_bias),
               {named<ExpertActivation>("an activation", activation, kActivations), alpha, beta,
                limit, up_limit}};
  for (const auto& [gate_up, down] : given) {
    made.experts.push_back({as_weight(gate_up), as_weight(down)});
    const Expert& expert = made.experts.back();
    if (expert.down.n() != made.hidden() || expert.down.k() != made.inner() ||
        expert.gate_up.n() != made.gate_up_outputs() || expert.gate_up.k() != made.hidden()) {
      throw py::value_error("expected experts of one shape: gate and up [2 · inner, hidden], or "
                            "up [inner, hidden] without a gate, and down [hidden, inner]");
    }
  }
  return made;
}

void run_experts(const Experts& experts, std::uintptr_t x, std::int64_t stride,
                 std::uintptr_t ids, std::uintptr_t weights, std::uintptr_t y, std::int64_t m,
                 std::int64_t chosen, const Level& level) {
  if (m < 0 || chosen <= 0) {
    throw py::value_error("expected no negative number of tokens, and experts for each");
  }
  const RoutedTokens step{pointer<const std::uint16_t>(x), stride,
                          pointer<const std::int32_t>(ids), pointer<const float>(weights),
                          pointer<std::uint16_t>(y), m, chosen};
  py::gil_scoped_release release;
  level.kernels.experts(experts, step);
}

// A layer's experts for a caller without Python.
struct ExpertCall {
  const Experts* experts;
  const Kernels* kernels;

  static const char* compute(const void* context, const ExpertTokensAt& tokens) {
    static thread_local std::string problem;
    const auto& [experts, kernels] = *static_cast<const ExpertCall*>(context);
    try {
      if (tokens.hidden != experts->hidden()) {
        throw std::invalid_argument("expected tokens of " + std::to_string(experts->hidden()) +
                                    " values, got " + std::to_string(tokens.hidden));
      }
      kernels->experts(*experts, {static_cast<const std::uint16_t*>(tokens.x), tokens.hidden,
                                  tokens.ids, tokens.weights,
                                  static_cast<std::uint16_t*>(tokens.y), tokens.m, tokens.chosen});
      return nullptr;
    } catch (const std::exception& error) {
      problem = error.what();
      return problem.c_str();
    }
  }
};

}  // namespace

void bind_experts(py::module_& module) {
  py::class_<Experts>(module, "Experts", "The routed experts of a mixture layer.")
      .def(py::init(&experts), py::kw_only(), py::arg("experts"), py::arg("gate_up_bias"),
           py::arg("down_bias"), py::arg("activation"), py::arg("alpha"), py::arg("beta"),
           py::arg("limit"), py::arg("up_limit"),
           "Each expert is two weights (address, Encoding): gate and up [2 · inner, hidden], whose\n"
           "blocks of 32 outputs are 16 of the gate and their 16 of up, and down [hidden, inner];\n"
           "activations without a gate have up alone, [inner, hidden].\n"
           "`activation` names a formula of csrc/kernels/expert_activations.h, which uses some of\n"
           "the figures behind it.\n"
           "Biases (float32, for each expert its outputs) are by address, or 0.  What all this\n"
           "points at must outlive this.\n"
           "Raises ValueError: shapes that do not fit together, an unknown activation.")
      .def("run", &run_experts, py::kw_only(), py::arg("x"), py::arg("stride"), py::arg("ids"),
           py::arg("weights"), py::arg("y"), py::arg("m"), py::arg("chosen"), py::arg("level"),
           "x [m, stride] → y [m, hidden], bf16, by address, as are ids [m, chosen], int32,\n"
           "negative for an expert that is not here, and weights [m, chosen], float32, or 0 for\n"
           "sums without weights.  Uses the threads of the OpenMP runtime that the process has.\n"
           "Raises ValueError: an expert that there is not.");

  py::class_<ExpertCall>(module, "ExpertCall",
                         "Experts as another native module calls them, see csrc/expert_call.h.")
      .def(py::init([](const Experts& experts, const Level& level) {
             return ExpertCall{&experts, &level.kernels};
           }),
           py::arg("experts"), py::arg("level"), py::keep_alive<1, 2>())
      .def_property_readonly(
          "function",
          [](const ExpertCall&) { return reinterpret_cast<std::uintptr_t>(&ExpertCall::compute); },
          "Address of the function; tokens and results are bf16.")
      .def_property_readonly(
          "context",
          [](const ExpertCall& call) { return reinterpret_cast<std::uintptr_t>(&call); },
          "Address of its context, valid as long as this is.")
      .def_property_readonly_static(
          "with_team",
          [](const py::object&) {
            const WithTeam function = &with_team;
            return reinterpret_cast<std::uintptr_t>(function);
          },
          "Address of what keeps the threads ready between calls.");
}

}  // namespace ray_hetero

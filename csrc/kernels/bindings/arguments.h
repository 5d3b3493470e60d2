// Arguments that several bindings take, made what the headers work with.

#pragma once

#include "../levels.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace ray_hetero {

namespace py = pybind11;

template <typename T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

using AsLinear = std::tuple<std::uintptr_t, std::uintptr_t, const Encoding&, const Adapters*>;
using AsNorm = std::tuple<std::string, std::uintptr_t, std::uintptr_t, float, bool>;

using AsWeight = std::tuple<std::uintptr_t, const Encoding&>;

inline Weight as_weight(const AsWeight& given) {
  return {pointer<const std::uint8_t>(std::get<0>(given)), &std::get<1>(given)};
}

inline Linear as_linear(const AsLinear& given) {
  const auto& [w, bias, encoding, adapters] = given;
  Linear made{{pointer<const std::uint8_t>(w), &encoding}, pointer<const float>(bias)};
  if (adapters == nullptr) return made;
  if (adapters->k != made.w.k() || adapters->n() != made.w.n()) {
    throw py::value_error("expected adapters of a layer [" + std::to_string(made.w.n()) + ", " +
                          std::to_string(made.w.k()) + "], got [" +
                          std::to_string(adapters->n()) + ", " + std::to_string(adapters->k) +
                          "]");
  }
  made.adapters = *adapters;
  return made;
}

// One of some values by its name.
template <typename T>
T named(const char* what, const std::string& name,
        const std::vector<std::pair<const char*, T>>& all) {
  std::string names;
  for (const auto& [one, value] : all) {
    if (name == one) return value;
    names += (names.empty() ? "" : ", ") + std::string(one);
  }
  throw py::value_error(std::string("expected ") + what + " among " + names + ", got " + name);
}

inline Norm as_norm(const AsNorm& given) {
  const auto& [kind, weight, bias, epsilon, of_rounded] = given;
  Norm made;
  made.kind = named<NormKind>("a norm", kind,
                              {{"rms", NormKind::kRootMeanSquare},
                               {"rms_plus_one", NormKind::kPlusOne},
                               {"layer", NormKind::kLayer}});
  made.weight = pointer<const std::uint16_t>(weight);
  made.bias = pointer<const std::uint16_t>(bias);
  made.epsilon = epsilon;
  made.of_rounded = of_rounded;
  return made;
}

inline std::optional<Norm> as_optional_norm(const std::optional<AsNorm>& given) {
  if (!given) return std::nullopt;
  return as_norm(*given);
}

[[noreturn]] inline void refuse(const char* what, std::int64_t request, std::int64_t found,
                         const char* expected, std::int64_t most) {
  throw py::value_error(std::string("expected ") + what + " " + expected + " " +
                        std::to_string(most) + ", got " + std::to_string(found) + " for request " +
                        std::to_string(request));
}

inline std::int64_t least_slots(const Linear& linear) {
  return linear.adapters.slices.empty() ? std::numeric_limits<std::int64_t>::max()
                                        : linear.adapters.slots;
}

inline std::int64_t least_slots(const PostAttention& layer) {
  std::int64_t least = std::min({least_slots(layer.output), least_slots(layer.gate_up),
                                 least_slots(layer.down)});
  if (layer.next) least = std::min(least, least_slots(layer.next->qkv));
  return least;
}

inline void check_slots(AdapterSlots slots, std::int64_t m, std::int64_t least) {
  if (slots == nullptr) return;
  for (std::int64_t i = 0; i < m; ++i) {
    if (slots[i] >= least) refuse("a slot of adapters", i, slots[i], "below", least);
  }
}

inline void check_positions(const Rotation& rotation, const std::int64_t* positions, std::int64_t m) {
  if (rotation.rotated == 0) return;
  for (std::int64_t i = 0; i < m; ++i) {
    if (positions[i] < 0 || positions[i] >= rotation.positions) {
      refuse("a position from 0 on,", i, positions[i], "below", rotation.positions);
    }
  }
}

using AsInputs = std::pair<std::uintptr_t, std::int64_t>;  // address, and stride of states
using AsStates = std::tuple<std::uintptr_t, std::int64_t, bool>;  // and whether they are float32

// The states of m tokens, whose numbers are below `states`.
inline LinearStates as_states(const AsInputs& inputs, const AsStates& heads, std::int64_t states,
                              std::uintptr_t numbers, std::int64_t m) {
  const auto& [data, stride, is_float] = heads;
  const LinearStates made{pointer<std::uint16_t>(inputs.first), inputs.second,
                          pointer<void>(data), stride, is_float,
                          pointer<const std::int32_t>(numbers), m};
  for (std::int64_t i = 0; i < m; ++i) {
    if (made.numbers[i] >= states) refuse("a state", i, made.numbers[i], "below", states);
  }
  return made;
}

// What each file here adds to the module.
void bind_weights(py::module_& module);
void bind_arrange(py::module_& module);
void bind_experts(py::module_& module);
void bind_rank_sums(py::module_& module);
void bind_post_attention(py::module_& module);
void bind_decode_step(py::module_& module);
void bind_latent_layer(py::module_& module);
void bind_gated_delta_layer(py::module_& module);
void bind_mamba2_mixer(py::module_& module);

}  // namespace ray_hetero

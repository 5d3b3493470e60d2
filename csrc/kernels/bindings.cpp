// Python's face of the headers here; the typed ones are ray_hetero/weight_formats/,
// streaming_linear.py, post_attention.py, decoder_layers.py and decode_step.py.

#include "../expert_call.h"
#include "levels.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

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
#include "formats/all.h"
#undef RAY_HETERO_PYTHON

namespace py = pybind11;

namespace {

using namespace ray_hetero;

template <typename T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

Level level(const std::string& name) {
  std::string names;
  for (const Level& one : levels()) {
    if (one.name == name) return one;
    names += (names.empty() ? "" : ", ") + std::string(one.name);
  }
  throw py::value_error("expected a level that this processor has (" + names + "), got " + name);
}

using AsLinear = std::tuple<std::uintptr_t, std::uintptr_t, const Encoding&, const Adapters*>;
using AsNorm = std::tuple<std::string, std::uintptr_t, std::uintptr_t, float, bool>;

using AsWeight = std::tuple<std::uintptr_t, const Encoding&>;

Weight as_weight(const AsWeight& given) {
  return {pointer<const std::uint8_t>(std::get<0>(given)), &std::get<1>(given)};
}

Linear as_linear(const AsLinear& given) {
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

Norm as_norm(const AsNorm& given) {
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

std::optional<Norm> as_optional_norm(const std::optional<AsNorm>& given) {
  if (!given) return std::nullopt;
  return as_norm(*given);
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
    throw py::value_error("expected nothing behind a norm without a perceptron");
  }
  if (made.next && made.next->qkv.w.k() != hidden) {
    throw py::value_error("expected the layers' inputs and outputs to fit together");
  }
  if (is_parallel && made.output_norm) {
    throw py::value_error("expected no norm of an attention that is beside its perceptron");
  }
  if (sums != nullptr && sums->elements() < kStepTokens * hidden) {
    throw py::value_error("expected room for the sums of " + std::to_string(kStepTokens) + " × " +
                          std::to_string(hidden) + " elements, got " +
                          std::to_string(sums->elements()));
  }
  return made;
}

Rotation rotation(std::int64_t heads, std::int64_t kv_heads, std::int64_t size,
                  std::uintptr_t cos_sin, std::int64_t positions, std::int64_t rotated,
                  bool is_interleaved, const std::optional<AsNorm>& query_norm,
                  const std::optional<AsNorm>& key_norm) {
  if (size <= 0 || size % kLanes != 0 || rotated < 0 || rotated > size || rotated % 2 != 0) {
    throw py::value_error("expected heads in multiples of 16, and pairs of them that turn");
  }
  return {heads, kv_heads, size, pointer<const std::uint16_t>(cos_sin), positions, rotated,
          is_interleaved, as_optional_norm(query_norm), as_optional_norm(key_norm)};
}

Scores scores(float scale, const std::optional<std::int64_t>& window, float soft_cap,
              std::uintptr_t sinks) {
  if (window.value_or(1) < 1) throw py::value_error("expected a window of one token or more");
  return {scale, window.value_or(Scores::kNoWindow), soft_cap, pointer<const float>(sinks)};
}

[[noreturn]] void refuse(const char* what, std::int64_t request, std::int64_t found,
                         const char* expected, std::int64_t most) {
  throw py::value_error(std::string("expected ") + what + " " + expected + " " +
                        std::to_string(most) + ", got " + std::to_string(found) + " for request " +
                        std::to_string(request));
}

std::int64_t least_slots(const Linear& linear) {
  return linear.adapters.slices.empty() ? std::numeric_limits<std::int64_t>::max()
                                        : linear.adapters.slots;
}

std::int64_t least_slots(const PostAttention& layer) {
  std::int64_t least = std::min({least_slots(layer.output), least_slots(layer.gate_up),
                                 least_slots(layer.down)});
  if (layer.next) least = std::min(least, least_slots(layer.next->qkv));
  return least;
}

void check_slots(AdapterSlots slots, std::int64_t m, std::int64_t least) {
  if (slots == nullptr) return;
  for (std::int64_t i = 0; i < m; ++i) {
    if (slots[i] >= least) refuse("a slot of adapters", i, slots[i], "below", least);
  }
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

DecoderLayers decoder_layers(
    const std::tuple<AsNorm, AsLinear>& first,
    const std::vector<std::tuple<Rotation, Scores, PostAttention>>& layers, bool ends_attended) {
  if (layers.empty()) throw py::value_error("expected at least one layer");
  DecoderLayers made{{as_norm(std::get<0>(first)), as_linear(std::get<1>(first))},
                     {},
                     ends_attended};
  const std::int64_t hidden = made.first.qkv.w.k();
  const Rotation& like = std::get<0>(layers.front());
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto& [rotation, scores, post_attention] = layers[i];
    const std::int64_t queries = rotation.heads * rotation.size;
    const std::int64_t qkv = queries + 2 * rotation.kv_heads * rotation.size;
    const bool is_last = i + 1 == layers.size();
    if (post_attention.output.w.n() != hidden || post_attention.output.w.k() != queries ||
        made.first.qkv.w.n() != qkv || post_attention.next.has_value() == is_last ||
        post_attention.sums != std::get<2>(layers.front()).sums ||
        (post_attention.next && post_attention.next->qkv.w.n() != qkv)) {
      throw py::value_error("expected layers of one shape and one group, each but the last with "
                            "the next one");
    }
    if (rotation.kv_heads <= 0 || rotation.heads % rotation.kv_heads != 0 ||
        rotation.size % kSpan != 0 || rotation.kv_heads != like.kv_heads ||
        rotation.size != like.size) {
      throw py::value_error("expected the same heads in each layer, their sizes multiples of 32, "
                            "and a multiple of the heads of keys for queries");
    }
    made.layers.push_back({rotation, scores, post_attention});
  }
  return made;
}

// Cheap beside a step, and what is wrong here would be read and written anywhere.
void check_requests(const Requests& requests, std::int64_t cache_blocks) {
  for (std::int64_t i = 0; i < requests.m; ++i) {
    const std::int64_t length = requests.lengths[i];
    const std::int64_t most = requests.most_blocks * requests.block;
    if (length < 1 || length > most) refuse("a length", i, length, "from 1 to", most);
    const std::int64_t slots = cache_blocks * requests.block;
    if (requests.slots[i] >= slots) refuse("a slot", i, requests.slots[i], "below", slots);
    const std::int32_t* blocks = requests.blocks + i * requests.most_blocks;
    for (std::int64_t at = 0; at * requests.block < length; ++at) {
      if (blocks[at] < 0 || blocks[at] >= cache_blocks) {
        refuse("a block from 0 on,", i, blocks[at], "below", cache_blocks);
      }
    }
  }
}

Requests as_requests(std::int64_t m, std::uintptr_t positions, std::uintptr_t slots,
                     std::uintptr_t lengths, std::uintptr_t blocks, std::int64_t most_blocks,
                     std::int64_t block, std::int64_t cache_blocks, bool tiles,
                     bool are_latents) {
  if (m <= 0 || m > kStepTokens) {
    throw py::value_error("expected 1 to " + std::to_string(kStepTokens) + " requests");
  }
  const std::int64_t multiple = are_latents ? kTile : kSpan;
  if (block <= 0 || block % multiple != 0) {
    throw py::value_error("expected blocks in multiples of " + std::to_string(multiple) +
                          " tokens");
  }
  const Requests made{m,
                      pointer<const std::int64_t>(positions),
                      pointer<const std::int64_t>(slots),
                      pointer<const std::int32_t>(lengths),
                      pointer<const std::int32_t>(blocks),
                      most_blocks,
                      block,
                      tiles ? Layout::kTiles : Layout::kRows};
  check_requests(made, cache_blocks);
  return made;
}

void check_positions(const Rotation& rotation, const std::int64_t* positions, std::int64_t m) {
  if (rotation.rotated == 0) return;
  for (std::int64_t i = 0; i < m; ++i) {
    if (positions[i] < 0 || positions[i] >= rotation.positions) {
      refuse("a position from 0 on,", i, positions[i], "below", rotation.positions);
    }
  }
}

using AsCache = std::tuple<std::uintptr_t, std::int64_t, std::int64_t, std::size_t>;

void run_step(const DecoderLayers& layers, const std::vector<Requests>& requests,
              const std::vector<AsCache>& caches, std::uintptr_t hidden, std::uintptr_t residual,
              std::uintptr_t y, std::uintptr_t sum, const Level& level, std::uintptr_t slots) {
  if (caches.size() != layers.layers.size() || requests.empty()) {
    throw py::value_error("expected a cache for each layer, and requests");
  }
  for (const Requests& one : requests) {
    if (one.m != requests.front().m) throw py::value_error("expected requests of the same tokens");
    for (const DecoderLayer& layer : layers.layers) {
      check_positions(layer.rotation, one.positions, one.m);
    }
  }
  std::vector<Cache> made;
  for (const auto& [cache, block_stride, head_stride, group] : caches) {
    if (group >= requests.size()) throw py::value_error("expected requests for each cache");
    made.push_back({pointer<std::uint16_t>(cache), block_stride, head_stride, group});
  }
  const Step step{pointer<const std::uint16_t>(hidden), pointer<const std::uint16_t>(residual),
                  pointer<std::uint16_t>(y), pointer<std::uint16_t>(sum),
                  pointer<const std::int64_t>(slots)};
  std::int64_t least = least_slots(layers.first.qkv);
  for (std::size_t i = 0; i < layers.post_attentions(); ++i) {
    least = std::min(least, least_slots(layers.layers[i].post_attention));
  }
  check_slots(step.slots, requests.front().m, least);
  py::gil_scoped_release release;
  level.kernels.decode_step(layers, made, requests, step);
}

void check(const LatentLayer& layer) {
  const LatentHeads& shape = layer.shape;
  const std::int64_t hidden = layer.down.w.k();
  for (const std::int64_t one : {shape.latent, shape.plain, shape.value, shape.size()}) {
    if (one <= 0 || one % kSpan != 0) {
      throw py::value_error("expected latents and parts of heads in multiples of 32");
    }
  }
  const bool fits = layer.down.w.n() == layer.query_latent() + shape.size() &&
                    (layer.query_norm || layer.queries.w.k() == hidden) &&
                    layer.queries.w.n() == shape.heads * shape.query() &&
                    layer.to_latent.n() == shape.heads * shape.latent &&
                    layer.to_latent.k() == shape.plain &&
                    layer.from_latent.n() == shape.heads * shape.value &&
                    layer.from_latent.k() == shape.latent &&
                    layer.behind.output.w.k() == shape.heads * shape.value &&
                    layer.behind.output.w.n() == hidden &&
                    layer.rotation.size == shape.rotated;
  if (!fits) throw py::value_error("expected the layers' inputs and outputs to fit together");
  if (layer.behind.has_mlp()) throw py::value_error("expected nothing behind the norm");
}

LatentLayer latent_layer(const std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                                          std::int64_t>& shape,
                         const AsNorm& norm, const AsLinear& down,
                         const std::optional<AsNorm>& query_norm, const AsLinear& queries,
                         const AsNorm& latent_norm, const Rotation& rotation,
                         const AsWeight& to_latent, const AsWeight& from_latent, float scale,
                         const PostAttention& behind) {
  const auto& [heads, latent, rotated, plain, value] = shape;
  if (heads <= 0) throw py::value_error("expected at least one head");
  LatentLayer made{{heads, latent, rotated, plain, value},
                   as_norm(norm),
                   as_linear(down),
                   as_optional_norm(query_norm),
                   as_linear(queries),
                   as_norm(latent_norm),
                   rotation,
                   as_weight(to_latent),
                   as_weight(from_latent),
                   scale,
                   behind};
  check(made);
  return made;
}

void run_latent_layer(const LatentLayer& layer, const Requests& requests,
                      const std::tuple<std::uintptr_t, std::int64_t, std::int64_t>& cache,
                      std::uintptr_t hidden, std::uintptr_t residual, std::uintptr_t y,
                      std::uintptr_t sum, const Level& level) {
  check_positions(layer.rotation, requests.positions, requests.m);
  const auto& [data, block_stride, token_stride] = cache;
  const LatentCache made{pointer<std::uint16_t>(data), block_stride, token_stride};
  const Step step{pointer<const std::uint16_t>(hidden), pointer<const std::uint16_t>(residual),
                  pointer<std::uint16_t>(y), pointer<std::uint16_t>(sum), nullptr};
  py::gil_scoped_release release;
  level.kernels.latent_layer(layer, made, requests, step);
}

void linear(std::uintptr_t x, std::int64_t stride, std::uintptr_t w, const Encoding& encoding,
            std::uintptr_t bias, std::uintptr_t y, std::int64_t m, const Level& level) {
  if (m < 0) throw py::value_error("expected no negative number of tokens");
  const Task task{pointer<const std::uint16_t>(x), {pointer<const std::uint8_t>(w), &encoding},
                  pointer<const float>(bias), pointer<std::uint16_t>(y), m, stride};
  py::gil_scoped_release release;
  level.kernels.linear(task);
}

void run_rank_sums(RankSums& sums, std::uintptr_t x, std::int64_t elements, std::uintptr_t y,
                   const Level& level, std::int64_t times) {
  if (elements <= 0 || elements > sums.elements() || elements % kLanes != 0 || times < 1) {
    throw py::value_error("expected from 16 to " + std::to_string(sums.elements()) +
                          " elements in multiples of 16, got " + std::to_string(elements));
  }
  py::gil_scoped_release release;
  level.kernels.sum_over_ranks(sums, pointer<const float>(x), elements,
                               pointer<std::uint16_t>(y), times);
}

Experts experts(const std::vector<std::tuple<AsWeight, AsWeight>>& given,
                std::uintptr_t gate_up_bias, std::uintptr_t down_bias, float alpha, float beta,
                float limit) {
  if (given.empty()) throw py::value_error("expected at least one expert");
  Experts made{{}, pointer<const float>(gate_up_bias), pointer<const float>(down_bias),
               {alpha, beta, limit}};
  for (const auto& [gate_up, down] : given) {
    made.experts.push_back({as_weight(gate_up), as_weight(down)});
    const Expert& expert = made.experts.back();
    if (expert.down.n() != made.hidden() || expert.down.k() != made.inner() ||
        expert.gate_up.n() != 2 * made.inner() || expert.gate_up.k() != made.hidden()) {
      throw py::value_error("expected experts of one shape: gate and up [2 · inner, hidden], "
                            "down [hidden, inner]");
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

PYBIND11_MODULE(_streaming_linear, module) {
  module.doc() = "Linear layers in bf16; few tokens at the bandwidth of the socket.";
  // Up to which products do nothing but read weights, with AMX.
  module.attr("FEW_TOKENS") = kFewTokens;
  // Most of a decode step in one call.
  module.attr("STEP_TOKENS") = kStepTokens;
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
             "Raises ValueError: a negative number of tokens.");
  module.def(
      "expand",
      [](std::uintptr_t w, const Encoding& encoding, std::uintptr_t packed, const Level& level) {
        py::gil_scoped_release release;
        level.kernels.expand({pointer<const std::uint8_t>(w), &encoding},
                             pointer<std::uint16_t>(packed));
      },
      py::kw_only(), py::arg("w"), py::arg("encoding"), py::arg("packed"), py::arg("level"),
      "Write any weight as packed rows; both by address.");

  py::class_<Experts>(module, "Experts", "The routed experts of a mixture layer.")
      .def(py::init(&experts), py::kw_only(), py::arg("experts"), py::arg("gate_up_bias"),
           py::arg("down_bias"), py::arg("alpha"), py::arg("beta"), py::arg("limit"),
           "Each expert is two weights (address, Encoding): gate and up [2 · inner, hidden], whose\n"
           "blocks of 32 outputs are 16 of the gate and their 16 of up, and down [hidden, inner].\n"
           "They become one by gate · sigmoid(alpha · gate) · (up + beta), both limited before.\n"
           "Biases (float32, for each expert its outputs) are by address, or 0.  What all this\n"
           "points at must outlive this.\n"
           "Raises ValueError: shapes that do not fit together.")
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
          "Address of its context, valid as long as this is.");

  py::class_<Rotation>(module, "Rotation",
                                   "Heads normalised and rotated by their tokens' positions.")
      .def(py::init(&rotation), py::kw_only(), py::arg("heads"), py::arg("kv_heads"),
           py::arg("size"), py::arg("cos_sin"), py::arg("positions"), py::arg("rotated"),
           py::arg("is_interleaved"), py::arg("query_norm"), py::arg("key_norm"),
           "Norms as in PostAttention, or None; cos_sin [positions, rotated], bf16, by address.\n"
           "`is_interleaved` has neighbours turn together, else halves of what is rotated.\n"
           "Raises ValueError: sizes that are no multiples of what a vector holds.")
      .def(
          "run",
          [](const Rotation& rotation, std::uintptr_t qkv, std::int64_t stride,
             std::uintptr_t positions, std::int64_t m, const Level& level) {
            check_positions(rotation, pointer<const std::int64_t>(positions), m);
            py::gil_scoped_release release;
            level.kernels.rotate(rotation, pointer<std::uint16_t>(qkv), stride,
                                 pointer<const std::int64_t>(positions), m);
          },
          py::arg("qkv"), py::arg("stride"), py::arg("positions"), py::arg("m"), py::arg("level"),
          "Queries and keys of qkv [m, stride], bf16, by address, in place; positions int64.\n"
          "Raises ValueError: a position that cos_sin does not have.");

  py::register_exception<MissingRank>(module, "MissingRank", PyExc_RuntimeError);
  py::class_<RankSums>(module, "RankSums",
                       "Sums over the ranks of a tensor-parallel group, in memory that they share.")
      .def(py::init([](std::uintptr_t memory, std::int64_t bytes, std::int64_t elements,
                       std::vector<int> ranks, std::int64_t own, double limit_s,
                       std::vector<int> connections) {
             return std::make_unique<RankSums>(pointer<std::uint8_t>(memory), bytes, elements,
                                               std::move(ranks), own, limit_s,
                                               std::move(connections));
           }),
           py::kw_only(), py::arg("memory"), py::arg("bytes"), py::arg("elements"),
           py::arg("ranks"), py::arg("own"), py::arg("limit_s"), py::arg("connections"),
           "Memory by address, whose bytes were 0 before the first of the ranks made this; `ranks`\n"
           "are their numbers for messages, `own` this one's place among them.  A rank is waited\n"
           "for `limit_s` seconds.  `connections` are descriptors of sockets to the other ranks, -1\n"
           "for none, whose end is that of the rank.  All this must outlive this.\n"
           "Raises ValueError: memory of another size.")
      .def_static("bytes", &RankSums::needed, py::arg("ranks"), py::arg("elements"),
                  "Bytes of the memory for sums of so many elements.")
      .def_property_readonly(
          "own_pages",
          [](const RankSums& sums) {
            const auto at = [&](std::int64_t rank) {
              return RankSums::partial_at(sums.size(), sums.elements(), rank);
            };
            return std::pair(at(sums.own()), at(sums.own() + 1));
          },
          "First and last byte, the latter not included, of the pages that this rank writes.")
      .def("run", &run_rank_sums, py::kw_only(), py::arg("x"), py::arg("elements"), py::arg("y"),
           py::arg("level"), py::arg("times") = 1,
           "y [elements], bf16 = the sums of all ranks' x [elements], float32, by address; all ranks\n"
           "have to call it.  With `times` the same is done so often.\n"
           "Raises ValueError: more elements than there is memory for.  Raises MissingRank: a rank\n"
           "has ended, is late, or computes something else.");

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
           "perceptron's norm is of the residual before the attention is added; `next` is a norm and\n"
           "a layer, or None; `sums` are those of the group whose ranks have parts of output and\n"
           "down, or None.  What all this points at must outlive it.\n"
           "Raises ValueError: shapes that do not fit together, a name that is none of these.")
      .def("run", &run_post_attention, py::arg("attended"), py::arg("residual"), py::arg("m"),
           py::arg("sum"), py::arg("y"), py::arg("level"), py::arg("slots") = 0,
           "sum [m, N], y [m, N of next or down] from attended [m, K], residual [m, N]: bf16, by\n"
           "address; `slots` [m], int64, by address, are those of each token's adapter, negative for\n"
           "none, or 0 where no token has one.\n"
           "Raises ValueError: a slot that adapters do not have.");

  py::class_<Scores>(module, "Scores", "What an attention does to its scores.")
      .def(py::init(&scores), py::kw_only(), py::arg("scale"), py::arg("window"),
           py::arg("soft_cap"), py::arg("sinks"),
           "They are multiplied with `scale`, then `soft_cap` · tanh(score / `soft_cap`), if it is\n"
           "not 0; of the last `window` tokens only, if it is not None; `sinks` [heads], float32,\n"
           "by address or 0, are scores of no token.\n"
           "Raises ValueError: a window without a token.");

  py::class_<Requests>(module, "Requests", "What a decode step's layers have in common.")
      .def(py::init(&as_requests), py::kw_only(), py::arg("m"), py::arg("positions"),
           py::arg("slots"), py::arg("lengths"), py::arg("blocks"), py::arg("most_blocks"),
           py::arg("block"), py::arg("cache_blocks"), py::arg("tiles"),
           py::arg("are_latents") = false,
           "m requests of one token each, by address: positions and slots [m], int64; lengths [m]\n"
           "and blocks [m, most_blocks], int32.  `block` is a block's tokens, `cache_blocks`\n"
           "their number, `tiles` whether keys and values lie in them as vLLM's kernel for AMX\n"
           "wants them; blocks of latents may have multiples of 16 tokens.\n"
           "Raises ValueError: more than STEP_TOKENS requests, blocks of no multiple of 32 tokens, a\n"
           "request without a token, or one that is not in the cache.");

  py::class_<DecoderLayers>(module, "DecoderLayers",
                                        "Decoder layers that follow one another.")
      .def(py::init(&decoder_layers), py::kw_only(), py::arg("first"), py::arg("layers"),
           py::arg("ends_attended") = false,
           "`first` is a norm and the qkv layer of queries, keys and values, each layer its\n"
           "Rotation, Scores and PostAttention; what they point at must outlive this.  With\n"
           "`ends_attended` nothing is computed behind the last layer's attention; its\n"
           "PostAttention is still given, without a next one.\n"
           "Raises ValueError: shapes that do not fit together.")
      .def("run", &run_step, py::kw_only(), py::arg("requests"), py::arg("caches"),
           py::arg("hidden"), py::arg("residual"), py::arg("y"), py::arg("sum"), py::arg("level"),
           py::arg("slots") = 0,
           "A decode step: hidden, residual (or 0) → y, which is still to be added to sum, all\n"
           "[m, N], bf16, by address.  With `ends_attended` y is the last layer's attention\n"
           "[m, queries] instead, row by row, whose output projection is still to be added to\n"
           "sum.  `requests` has the same tokens several times where layers have their keys and\n"
           "values in different blocks.  Each layer's cache is (address of [blocks, heads of\n"
           "keys, keys and values of a block], strides of blocks and of heads in elements, index\n"
           "of its requests).  `slots` are as in PostAttention.\n"
           "Raises ValueError: not as many caches as layers, a position that cos_sin does not have,\n"
           "a slot that adapters do not have.");

  py::class_<LatentLayer>(module, "LatentLayer",
                          "A layer with multi-head latent attention, up to the norm before its\n"
                          "perceptron or experts.")
      .def(py::init(&latent_layer), py::kw_only(), py::arg("shape"), py::arg("norm"),
           py::arg("down"), py::arg("query_norm"), py::arg("queries"), py::arg("latent_norm"),
           py::arg("rotation"), py::arg("to_latent"), py::arg("from_latent"), py::arg("scale"),
           py::arg("behind"),
           "`shape` is heads, elements of a latent, of the rotated part of keys and queries, of the\n"
           "plain part of queries, of values.  Norms and layers as in PostAttention: `down` gives the\n"
           "latent of queries if `query_norm` is not None, the latent, the rotated part of keys;\n"
           "`queries` gives [heads][plain, rotated].  Weights are (address, Encoding), neither with\n"
           "outliers: `to_latent` [heads * latent, plain], `from_latent` [heads * value, latent].\n"
           "`rotation` is of one rotated part; `behind` is without a perceptron.  What all this\n"
           "points at must outlive it.\n"
           "Raises ValueError: shapes that do not fit together, or are no multiples of 32.")
      .def("run", &run_latent_layer, py::kw_only(), py::arg("requests"), py::arg("cache"),
           py::arg("hidden"), py::arg("residual"), py::arg("y"), py::arg("sum"), py::arg("level"),
           "A decode step: hidden, residual (or 0) → y, what the norm behind the attention gives, and\n"
           "sum, all [m, N], bf16, by address.  The cache is (address of [blocks, tokens of a block,\n"
           "latent and rotated part], strides of blocks and of tokens in elements).\n"
           "Raises ValueError: a position that cos_sin does not have.");
}

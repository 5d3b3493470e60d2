// Decode steps: rotation, what an attention does to its scores, requests, layers.

#include "arguments.h"

namespace ray_hetero {
namespace {

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

DecoderLayers decoder_layers(
    const std::tuple<AsNorm, AsLinear>& first,
    const std::vector<std::tuple<Rotation, Scores, PostAttention>>& layers) {
  if (layers.empty()) throw py::value_error("expected at least one layer");
  DecoderLayers made{{as_norm(std::get<0>(first)), as_linear(std::get<1>(first))}, {}};
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

// Of each layer the cores compute some columns and leave some, or some outputs too, and none has
// adapters.
void check_columns(const DecoderLayers& layers, const Step& step, std::int64_t m) {
  if (step.share->more(m) < 0) {
    throw py::value_error("expected at most " + std::to_string(step.share->room()) +
                          " tokens, for which there is room, got " + std::to_string(m));
  }
  for (std::size_t i = 0; i < layers.layers.size(); ++i) {
    const PostAttention& layer = layers.layers[i].post_attention;
    const std::int64_t blocks = layer.inner() / kBlock;
    if (step.kept < 1 || step.kept >= blocks || !layer.gate_up.adapters.slices.empty()) {
      throw py::value_error("expected from 1 to " + std::to_string(blocks - 1) +
                            " blocks of an MLP without adapters, got " + std::to_string(step.kept));
    }
    if (step.kept_outputs == 0) continue;
    const std::int64_t outputs = layer.down.w.blocks();
    if (step.kept_outputs < 1 || step.kept_outputs >= outputs || layer.sums != nullptr ||
        step.share->outputs() == nullptr || !layer.down.adapters.slices.empty()) {
      throw py::value_error("expected from 1 to " + std::to_string(outputs - 1) +
                            " blocks of outputs of an MLP without adapters, which no ranks add up "
                            "and a GPU has memory for, got " +
                            std::to_string(step.kept_outputs));
    }
  }
}

using AsCache = std::tuple<std::uintptr_t, std::int64_t, std::int64_t, std::size_t>;

void run_step(const DecoderLayers& layers, const std::vector<Requests>& requests,
              const std::vector<AsCache>& caches, std::uintptr_t hidden, std::uintptr_t residual,
              std::uintptr_t y, std::uintptr_t sum, const Level& level, std::uintptr_t slots,
              ColumnShare* share, std::int64_t kept, std::int64_t kept_outputs) {
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
    const Rotation& rotation = layers.layers[made.size()].rotation;
    const std::int64_t of_head = 2 * requests[group].block * rotation.size;
    if (block_stride < of_head || (rotation.kv_heads > 1 && head_stride < of_head)) {
      throw py::value_error("expected strides of a cache of at least " + std::to_string(of_head) +
                            " elements, got " + std::to_string(block_stride) + " and " +
                            std::to_string(head_stride));
    }
    made.push_back({pointer<std::uint16_t>(cache), block_stride, head_stride, group});
  }
  const Step step{pointer<const std::uint16_t>(hidden), pointer<const std::uint16_t>(residual),
                  pointer<std::uint16_t>(y), pointer<std::uint16_t>(sum),
                  pointer<const std::int64_t>(slots), share, kept, kept_outputs};
  if (share != nullptr) check_columns(layers, step, requests.front().m);
  std::int64_t least = least_slots(layers.first.qkv);
  for (std::size_t i = 0; i < layers.layers.size(); ++i) {
    least = std::min(least, least_slots(layers.layers[i].post_attention));
  }
  check_slots(step.slots, requests.front().m, least);
  py::gil_scoped_release release;
  level.kernels.decode_step(layers, made, requests, step);
}

}  // namespace

void bind_decode_step(py::module_& module) {
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
            const std::int64_t turned = (rotation.heads + rotation.kv_heads) * rotation.size;
            if (m > 1 && stride < turned) {
              throw py::value_error("expected a stride of at least " + std::to_string(turned) +
                                    " elements, got " + std::to_string(stride));
            }
            py::gil_scoped_release release;
            level.kernels.rotate(rotation, pointer<std::uint16_t>(qkv), stride,
                                 pointer<const std::int64_t>(positions), m);
          },
          py::arg("qkv"), py::arg("stride"), py::arg("positions"), py::arg("m"), py::arg("level"),
          "Queries and keys of qkv [m, stride], bf16, by address, in place; positions int64.\n"
          "Raises ValueError: a position that cos_sin does not have, a stride that is shorter than\n"
          "queries and keys.");

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
           "`first` is a norm and the qkv layer of queries, keys and values, each layer its\n"
           "Rotation, Scores and PostAttention; what they point at must outlive this.\n"
           "Raises ValueError: shapes that do not fit together.")
      .def("run", &run_step, py::kw_only(), py::arg("requests"), py::arg("caches"),
           py::arg("hidden"), py::arg("residual"), py::arg("y"), py::arg("sum"), py::arg("level"),
           py::arg("slots") = 0, py::arg("share") = nullptr, py::arg("kept") = 0,
           py::arg("kept_outputs") = 0,
           "A decode step: hidden, residual (or 0) → y, which is still to be added to sum, all\n"
           "[m, N], bf16, by address.  `requests` has the same tokens several times where layers have their keys and\n"
           "values in different blocks.  Each layer's cache is (address of [blocks, heads of\n"
           "keys, keys and values of a block], strides of blocks and of heads in elements, index\n"
           "of its requests).  `slots` are as in PostAttention.  With a ColumnShare only the first\n"
           "`kept` blocks of 32 outputs of each MLP's gate and up are computed here, and the first\n"
           "`kept_outputs` blocks of its own outputs, or all if that is 0.\n"
           "Raises ValueError: not as many caches as layers, strides in which they overlap, a position\n"
           "that cos_sin does not have, a slot that adapters do not have, `kept` that is none or all, `kept_outputs` that are\n"
           "all, or whose MLP has adapters or is added up by ranks, more tokens than a ColumnShare has\n"
           "room for.  Raises MissingColumns: columns were not computed, or not in time.");

  py::register_exception<MissingColumns>(module, "MissingColumns", PyExc_RuntimeError);
  py::class_<ColumnShare>(module, "ColumnShare", "Columns of MLPs that a GPU computes.")
      .def(py::init([](std::uintptr_t words, std::uintptr_t inputs, std::uintptr_t columns,
                       double limit_s, std::uintptr_t outputs) {
             return std::make_unique<ColumnShare>(pointer<ColumnShare::Words>(words),
                                                  pointer<std::uint16_t>(inputs),
                                                  pointer<const std::uint16_t>(columns),
                                                  pointer<const std::uint16_t>(outputs), limit_s);
           }),
           py::kw_only(), py::arg("words"), py::arg("inputs"), py::arg("columns"),
           py::arg("limit_s"), py::arg("outputs") = 0,
           "By address: `words`, four lines of 64 bytes that begin with a word of 32 bits each:\n"
           "layers that were asked for, layers whose columns are there, whether no more will be,\n"
           "and layers whose outputs are there; `inputs`, which the gate multiplies, [m, inputs], or\n"
           "[inputs / 32, room, 32] where the level has tiles; `columns`, what comes back,\n"
           "[m, columns]; `outputs`, what comes back of the MLP, [m, outputs], or 0; all bf16.  All\n"
           "this must outlive this.")
      .def_property("room", &ColumnShare::room, &ColumnShare::set_room,
                    "Tokens that inputs in tiles have room for in a step; 0 for those of the step.")
      .def_property_readonly("asked", &ColumnShare::asked,
                             "Layers that were asked for, modulo 2 to the power of 32.")
      .def_property_readonly("waited_s", &ColumnShare::waited_s,
                             "Seconds that the cores have waited for columns in all steps.");
}

}  // namespace ray_hetero

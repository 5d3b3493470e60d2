// What is computed: linear layers, and decoder layers that are made of them.

#pragma once

#include "column_share.h"
#include "rank_sums.h"
#include "tokens.h"
#include "weight.h"

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace ray_hetero {

// y = x · Wᵀ + bias.
struct Task {
  const std::uint16_t* x;  // bf16, see places()
  Weight w;
  const float* bias;  // [n], or nullptr
  std::uint16_t* y;   // [m][n] bf16
  std::int64_t m, stride;
  bool x_is_tiles = false;  // for levels with tiles, and few tokens
  float* partial = nullptr;  // [m][n], in the place of y: what the ranks of a group add up
  std::int64_t y_stride = 0;  // elements from a token of y to the next, where they are not n
  std::int64_t more = 0;      // tokens that tiles of x have room for besides these

  std::uint16_t* y_of(std::int64_t token) const {
    return y + token * (y_stride == 0 ? w.n() : y_stride);
  }
  Places places() const { return {m, stride, x_is_tiles, more}; }
};

// Low-rank adapters of neighbouring outputs of a linear layer, one in each slot: y += B · (A · x).
struct AdapterSlice {
  const std::uint16_t* a;  // [slots][rank][k], bf16
  const std::uint16_t* b;  // [slots][outputs][rank], bf16
  std::int64_t outputs;
};

// Those of all its outputs; what is in a slot may be another adapter in each step.
struct Adapters {
  std::int64_t slots = 0, rank = 0, k = 0;
  std::vector<AdapterSlice> slices;  // none where a layer has no adapters

  std::int64_t n() const {
    std::int64_t outputs = 0;
    for (const AdapterSlice& slice : slices) outputs += slice.outputs;
    return outputs;
  }
};

struct Linear {
  Weight w;
  const float* bias = nullptr;  // [n], or nullptr
  Adapters adapters = {};
};

enum class NormKind {
  kRootMeanSquare,  // weighted by w; rounded before
  kPlusOne,         // the same, weighted by 1 + w; not rounded before
  kLayer,           // of what the mean leaves, weighted by w, plus the bias
};

struct Norm {
  NormKind kind = NormKind::kRootMeanSquare;
  const std::uint16_t* weight = nullptr;  // bf16
  const std::uint16_t* bias = nullptr;    // bf16, or nullptr
  float epsilon = 0;
  bool of_rounded = false;  // whether a sum is rounded to bf16 before its norm is taken
};

// How a layer begins.
struct QkvInput {
  Norm norm;   // before the attention
  Linear qkv;  // queries, keys and values
};

// What is between the products of an MLP.
enum class MlpActivation { kSilu, kGelu, kGeluTanh, kRelu, kReluSquared };

// What a decoder layer computes from one attention to the next.
struct PostAttention {
  Linear output;                    // of the attention that was
  std::optional<Norm> output_norm;  // of what it gives, before that is added
  Norm norm;                        // before the MLP
  // Gate and up are one: [2 · k of down]; else up alone.  Without `down` nothing comes behind the norm.
  Linear gate_up, down;
  MlpActivation activation = MlpActivation::kSilu;
  std::optional<Norm> down_norm;  // of what the MLP gives, before that is added
  float multiplier = 1;           // of what is added to the residual
  bool is_parallel = false;       // whether the MLP's norm is of the attention's residual
  std::optional<QkvInput> next;   // of the layer that comes; none after the last
  RankSums* sums = nullptr;       // of the group whose ranks have parts of output and down, if any

  bool has_mlp() const { return down.w.encoding != nullptr; }
  bool is_gated() const { return gate_up.w.n() != inner(); }
  std::int64_t inner() const { return has_mlp() ? down.w.k() : 0; }
  // The first blocks of the gate and of up, or of up alone.
  Weight gate_up_of(std::int64_t kept) const {
    return {gate_up.w.data, gate_up.w.encoding, kept, inner() / kBlock};
  }
  // The first blocks of the MLP's outputs.
  Weight down_of(std::int64_t kept) const {
    return {down.w.data, down.w.encoding, kept, down.w.blocks()};
  }
  std::int64_t outputs() const { return next ? next->qkv.w.n() : output.w.n(); }
};

// What an attention does to each head before it attends.
struct Rotation {
  std::int64_t heads = 0, kv_heads = 0, size = 0;  // of queries, of keys, and elements of each
  const std::uint16_t* cos_sin = nullptr;          // [positions][rotated], cosines first, bf16
  std::int64_t positions = 0;
  std::int64_t rotated = 0;     // elements of a head that are, from the first on
  bool is_interleaved = false;  // whether neighbours turn together; else halves of what is rotated
  std::optional<Norm> query_norm, key_norm;
};

// What an attention does to its scores.
struct Scores {
  static constexpr std::int64_t kNoWindow = std::numeric_limits<std::int64_t>::max();

  float scale = 1;
  std::int64_t window = kNoWindow;  // tokens that are attended to: the last ones
  float soft_cap = 0;               // largest magnitude, reached by a hyperbolic tangent; 0: none
  const float* sinks = nullptr;     // [heads], a score for no token; or nullptr
};

// How keys and values of a head lie in a block; `isa` of vLLM's cpu_attn_reshape_and_cache.
enum class Layout {
  kTiles,  // "amx": keys [block / 16][size / 2][16][2], values [size / 16][block / 2][16][2]
  kRows,   // "vec": keys [size][block], values [block][size]
};

// Keys and values of a layer: [blocks][kv heads], keys of a block first, then its values.
struct Cache {
  std::uint16_t* data;
  std::int64_t block_stride, head_stride;  // elements
  std::size_t group;                       // of layers whose requests have the same blocks
};

// The requests of a decode step, a token each; the same for all layers whose keys and values lie in
// the same blocks.
struct Requests {
  std::int64_t m = 0;
  const std::int64_t* positions = nullptr;  // [m]
  const std::int64_t* slots = nullptr;    // [m], where keys and values go; negative: nowhere
  const std::int32_t* lengths = nullptr;  // [m], tokens with this one
  const std::int32_t* blocks = nullptr;   // [m][most_blocks]
  std::int64_t most_blocks = 0;
  std::int64_t block = 0;  // tokens of a block
  Layout layout = Layout::kRows;
};

struct DecoderLayer {
  Rotation rotation;
  Scores scores;
  PostAttention post_attention;
};

// Decoder layers that follow one another.
struct DecoderLayers {
  QkvInput first;
  std::vector<DecoderLayer> layers;
};

// Heads of a multi-head latent attention: keys and values of all of them are one latent a token, and
// a rotated part of the keys.
struct LatentHeads {
  std::int64_t heads = 0;
  std::int64_t latent = 0;   // elements of what is cached of a token, and read as keys and as values
  std::int64_t rotated = 0;  // elements behind it: the part of keys and queries that is rotated
  std::int64_t plain = 0;    // elements of a head's queries in front of that part
  std::int64_t value = 0;    // elements of a head's values

  std::int64_t size() const { return latent + rotated; }  // of a cached token
  std::int64_t query() const { return plain + rotated; }
};

// A layer with multi-head latent attention, up to the norm before its MLP or experts.  Queries
// are multiplied with what would make keys of latents, so that all heads attend to latents alone.
struct LatentLayer {
  LatentHeads shape;
  Norm norm;                       // before the attention
  Linear down;                     // gives [latent of queries,] latent, rotated part of keys
  std::optional<Norm> query_norm;  // of the latent of queries, in models that have one
  Linear queries;                  // gives [heads][plain, rotated], of that latent or of the hidden state
  Norm latent_norm;
  Rotation rotation;               // of the rotated parts; its norms are none
  Weight to_latent;                // [heads · latent, plain]
  Weight from_latent;              // [heads · value, latent]
  float scale = 1;                 // of scores
  PostAttention behind;            // without an MLP

  std::int64_t query_latent() const { return query_norm ? queries.w.k() : 0; }
};

// Latents of a layer, row by row.
struct LatentCache {
  std::uint16_t* data;
  std::int64_t block_stride, token_stride;  // elements
};

// Heads of a Gated DeltaNet: queries and keys of each key head belong to as many value heads.
struct GatedDeltaHeads {
  std::int64_t key_heads = 0, value_heads = 0;
  std::int64_t key = 0, value = 0;  // elements of a head's key or query, and of its value
  // Whether products give what belongs to a key head together, [query, key, values, output gates] and
  // [write gates, decays]; else each of these for all heads.
  bool is_by_key_head = false;

  std::int64_t each() const { return value_heads / key_heads; }
  std::int64_t keys() const { return key_heads * key; }
  std::int64_t values() const { return value_heads * value; }
  std::int64_t channels() const { return 2 * keys() + values(); }  // that are convolved
  std::int64_t inputs() const { return channels() + values(); }
};

// A layer with a Gated DeltaNet, up to the norm before its experts, or with its MLP.
struct GatedDeltaLayer {
  GatedDeltaHeads heads;
  Norm norm;     // before its products
  Linear input;  // gives queries, keys, values and output gates
  Linear gates;  // gives a write gate and a decay for each value head; more outputs are not read
  const std::uint16_t* taps = nullptr;  // of the convolution [taps][channels], bf16, the last of now
  std::int64_t tap_count = 0;
  const float* rates = nullptr;      // [value heads], below 0: of decays
  const float* rate_bias = nullptr;  // [value heads]
  const float* head_norm = nullptr;  // [value], of what heads give
  float epsilon = 0;
  bool is_sigmoid = false;  // whether output gates are; else they are SiLU
  PostAttention behind;
};

// Heads of a mixer of Mamba 2: those of a group have their keys and queries in common, which the model
// calls B and C.
struct Mamba2Heads {
  std::int64_t heads = 0, groups = 0;
  std::int64_t value = 0, state = 0;  // elements of a head's value, and of a group's key or query

  std::int64_t each() const { return heads / groups; }
  std::int64_t values() const { return heads * value; }
  std::int64_t keys() const { return groups * state; }
  std::int64_t channels() const { return values() + 2 * keys(); }  // that are convolved
  std::int64_t inputs() const { return values() + channels() + heads; }
};

// A mixer of Mamba 2, from the product of its input to that of its output.
struct Mamba2Mixer {
  Mamba2Heads heads;
  Linear input;  // gives output gates, values, keys, queries, and a step for each head
  const std::uint16_t* factors = nullptr;  // [inputs] of what it gives, bf16; nullptr for none
  const std::uint16_t* taps = nullptr;  // of the convolution [taps][channels], bf16, the last of now
  std::int64_t tap_count = 0;
  const float* tap_bias = nullptr;   // [channels], or nullptr
  const float* rates = nullptr;      // [heads], below 0: of decays
  const float* step_bias = nullptr;  // [heads]
  const float* skips = nullptr;      // [heads], factors of a value that is added to what its head gives
  const std::uint16_t* norm = nullptr;  // [values], bf16, of what heads give; nullptr for no norm
  std::int64_t norm_groups = 1;         // that are normalised each by itself
  float epsilon = 0;
  Linear output;
  RankSums* sums = nullptr;  // of the group whose ranks have parts of the heads, if any
};

// States of a layer, and which of them the tokens of a step have.
struct LinearStates {
  std::uint16_t* inputs = nullptr;  // [states][tap_count - 1][channels], bf16, the oldest first
  std::int64_t inputs_stride = 0;   // elements from a state to the next
  // [states][value heads][key][value], of Mamba 2 [states][heads][value][state].
  void* heads = nullptr;
  std::int64_t heads_stride = 0;
  bool is_float = false;                   // whether the latter are float32; else bf16
  const std::int32_t* numbers = nullptr;  // [m]; 0 and below for a token without a state
  std::int64_t m = 0;
};

// Formulas of what lies between the products of a mixture's expert: each NAME has a class NAME in
// expert_activations.h, which says it, and a row in ray_hetero/kernels/experts/activations.py.
#define RAY_HETERO_EXPERT_ACTIVATIONS(ACTIVATION)                                            \
  ACTIVATION(Swiglu, "swiglu", true) ACTIVATION(SwigluStep, "swiglu_step", true)             \
  ACTIVATION(Situ, "situ", true) ACTIVATION(GatedGelu, "gelu_and_mul", true)                 \
  ACTIVATION(GatedGeluTanh, "gelu_tanh_and_mul", true) ACTIVATION(SiluAlone, "silu", false)  \
  ACTIVATION(GeluAlone, "gelu", false) ACTIVATION(GeluTanhAlone, "gelu_tanh", false)         \
  ACTIVATION(ReluSquaredAlone, "relu_squared", false)

#define RAY_HETERO_ACTIVATION(name, says, gated) k##name,
enum class ExpertActivation { RAY_HETERO_EXPERT_ACTIVATIONS(RAY_HETERO_ACTIVATION) };
#undef RAY_HETERO_ACTIVATION

// How gate and up become one, or what becomes of up alone; a formula uses some of the figures.
struct Activation {
  ExpertActivation formula = ExpertActivation::kSwiglu;
  float alpha = 1, beta = 0;
  // Of the gate, and of up.
  float limit = std::numeric_limits<float>::infinity();
  float up_limit = std::numeric_limits<float>::infinity();

  bool is_gated() const {
    switch (formula) {
#define RAY_HETERO_ACTIVATION(name, says, gated) \
  case ExpertActivation::k##name: return gated;
      RAY_HETERO_EXPERT_ACTIVATIONS(RAY_HETERO_ACTIVATION)
#undef RAY_HETERO_ACTIVATION
    }
    return true;
  }
};

// One expert of a layer.
struct Expert {
  // [2 · inner, hidden]; a block is 16 outputs of the gate, then their 16 of up.  Without a gate
  // [inner, hidden].
  Weight gate_up;
  Weight down;     // [hidden, inner]
};

// The routed experts of a mixture layer, all of one shape.
struct Experts {
  std::vector<Expert> experts;
  const float* gate_up_bias = nullptr;  // [experts][outputs of gate_up] as these are, or nullptr
  const float* down_bias = nullptr;     // [experts][hidden], or nullptr
  Activation activation;

  std::int64_t hidden() const { return experts.front().down.n(); }
  std::int64_t inner() const { return experts.front().down.k(); }
  std::int64_t gate_up_outputs() const { return (activation.is_gated() ? 2 : 1) * inner(); }
};

// x [m][stride] → y [m][hidden], bf16, each token by the experts that were chosen for it.
struct RoutedTokens {
  const std::uint16_t* x;
  std::int64_t stride;
  const std::int32_t* ids;  // [m][chosen], negative for an expert that is not here
  const float* weights;     // [m][chosen], or nullptr for sums without weights
  std::uint16_t* y;
  std::int64_t m, chosen;
};

// The slot of each token's adapter [m], negative for none; nullptr where no token has one.
using AdapterSlots = const std::int64_t*;

// hidden [m][n], residual [m][n] or nullptr → y [m][n], still to be added to sum [m][n]; all bf16.
// Of layers that end with an attention y is that, [m][queries], whose output projection is still to
// be added to sum.
struct Step {
  const std::uint16_t* hidden = nullptr;
  const std::uint16_t* residual = nullptr;
  std::uint16_t* y = nullptr;
  std::uint16_t* sum = nullptr;
  AdapterSlots slots = nullptr;
  // What a GPU computes of MLPs, and how many blocks of gates, and of the MLPs' outputs (0: all), the
  // cores do then; no adapters.
  ColumnShare* share = nullptr;
  std::int64_t kept = 0, kept_outputs = 0;
};

}  // namespace ray_hetero

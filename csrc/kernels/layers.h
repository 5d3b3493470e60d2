// What is computed: linear layers, and decoder layers that are made of them.

#pragma once

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

  Places places() const { return {m, stride, x_is_tiles}; }
};

struct Linear {
  Weight w;
  const float* bias = nullptr;  // [n], or nullptr
};

// A root-mean-square norm.
struct Norm {
  const std::uint16_t* weight = nullptr;  // bf16
  float epsilon = 0;
};

// How a layer begins.
struct QkvInput {
  Norm norm;   // before the attention
  Linear qkv;  // queries, keys and values
};

// What a decoder layer computes from one attention to the next.
struct PostAttention {
  Linear output;                // of the attention that was
  Norm norm;                    // before the multi-layer perceptron
  Linear gate_up, down;         // gate and up are one: [2 · k of down]
  std::optional<QkvInput> next;  // of the layer that comes; none after the last
  RankSums* sums = nullptr;      // of the group whose ranks have parts of output and down, if any

  std::int64_t outputs() const { return next ? next->qkv.w.n() : down.w.n(); }
};

// What an attention does to each head before it attends.
struct Rotation {
  std::int64_t heads = 0, kv_heads = 0, size = 0;  // of queries, of keys, and elements of each
  const std::uint16_t* cos_sin = nullptr;          // [positions][rotated], cosines first, bf16
  std::int64_t positions = 0;
  std::int64_t rotated = 0;                        // elements of a head that are, from the first on
  std::optional<Norm> query_norm, key_norm;
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
};

// The requests of a decode step, a token each; the same for all layers.
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
  float scale = 1;  // of scores
  PostAttention post_attention;
};

// Decoder layers that follow one another.
struct DecoderLayers {
  QkvInput first;
  std::vector<DecoderLayer> layers;
};

// How gate and up of a mixture's expert become one: gate · sigmoid(alpha · gate) · (up + beta).
struct Activation {
  float alpha = 1, beta = 0;
  float limit = std::numeric_limits<float>::infinity();  // to gate from above, to up on both sides
};

// One expert of a layer.
struct Expert {
  Weight gate_up;  // [2 · inner, hidden]; a block is 16 outputs of the gate, then their 16 of up
  Weight down;     // [hidden, inner]
};

// The routed experts of a mixture layer, all of one shape.
struct Experts {
  std::vector<Expert> experts;
  const float* gate_up_bias = nullptr;  // [experts][2 · inner] as the outputs are, or nullptr
  const float* down_bias = nullptr;     // [experts][hidden], or nullptr
  Activation activation;

  std::int64_t hidden() const { return experts.front().down.n(); }
  std::int64_t inner() const { return experts.front().down.k(); }
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

// hidden [m][n], residual [m][n] or nullptr → y [m][n], still to be added to sum [m][n]; all bf16.
struct Step {
  const std::uint16_t* hidden = nullptr;
  const std::uint16_t* residual = nullptr;
  std::uint16_t* y = nullptr;
  std::uint16_t* sum = nullptr;
};

}  // namespace ray_hetero

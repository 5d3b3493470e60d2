// The part of a Gated DeltaNet that has a state, for a token of each request:
//
//   c ← silu(taps · [inputs before | input])      S ← e^decay · S + k ⊗ β·(v − e^decay · Sᵀk)
//   y ← norm(Sᵀq) · gate(z)
//
// where c is [q | k | v] of all heads, q and k are divided by their lengths, q also by the root of its
// size, and S [key][value] is the state of a head.  A state is read once from memory and written once:
// its second reading follows the first within a thread's first-level cache.
//
// Rounding is that of vLLM's operators for CPUs: c, β on its way and Sᵀq are bf16, a state is what it
// is stored as.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "activations.h"
#include "layers.h"
#include "linear_states.h"
#include "scratch.h"
#include "tokens.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

// A write gate as vLLM's operator rounds a sigmoid of bf16.
inline float write_gate(float x) {
  const float power = as_float(as_bf16(std::exp(-x)));
  return as_float(as_bf16(1.0f / as_float(as_bf16(1.0f + power))));
}

class GatedDelta {
 public:
  // input [m][stride] and gates [m][gates_stride] are what the products give, y is as `places` says;
  // `between` has room for elements().
  GatedDelta(const GatedDeltaLayer& layer, const LinearStates& states, const std::uint16_t* input,
             std::int64_t stride, const std::uint16_t* gates, std::int64_t gates_stride,
             std::uint16_t* between, std::uint16_t* y, const Places& places)
      : layer_(layer), shape_(layer.heads), states_(states), input_(input), stride_(stride),
        gates_(gates), gates_stride_(gates_stride), convolved_(between),
        given_(between + states.m * layer.heads.channels()), y_(y), places_(places) {}

  static std::int64_t elements(const GatedDeltaHeads& shape, std::int64_t m) {
    return m * (shape.channels() + shape.values());
  }

  // A thread's own memory, which it has to have before it begins to work.
  static void reserve_own(const GatedDeltaHeads& shape) { scratch(2 * shape.key, kOwnKeys); }

  // The first states of a thread's share of update().
  ReadAhead ahead(int thread, int threads) const {
    const std::int64_t all = units(), first = all * thread / threads;
    const std::int64_t count = all * (thread + 1) / threads - first, head = first / parts();
    if (count == 0 || state_of(head / shape_.value_heads) <= 0) return {nullptr, 0};
    const std::int64_t size = states_.is_float ? sizeof(float) : sizeof(std::uint16_t);
    return {static_cast<const std::uint8_t*>(states_.heads) + place_of_head(head) * size,
            count * kSpan * shape_.key * size};
  }

  // Three pieces of work, each once all threads have done the one before.
  void convolve(int thread, int threads) const {
    const std::int64_t channels = shape_.channels(), parts = channels / kLanes;
    const std::int64_t all = states_.m * parts;
    for (std::int64_t i = all * thread / threads; i < all * (thread + 1) / threads; ++i) {
      const std::int64_t token = i / parts, at = i % parts * kLanes;
      if (state_of(token) > 0) convolve_some(token, at);
    }
  }

  void update(int thread, int threads) const {
    if (states_.is_float) {
      update(static_cast<float*>(states_.heads), thread, threads);
    } else {
      update(static_cast<std::uint16_t*>(states_.heads), thread, threads);
    }
  }

  void finish(int thread, int threads) const {
    const std::int64_t all = states_.m * shape_.value_heads;
    for (std::int64_t i = all * thread / threads; i < all * (thread + 1) / threads; ++i) {
      if (layer_.is_sigmoid) {
        normalise<false>(i / shape_.value_heads, i % shape_.value_heads);
      } else {
        normalise<true>(i / shape_.value_heads, i % shape_.value_heads);
      }
    }
  }

 private:
  static constexpr std::int64_t kSpan = 2 * kLanes;  // of values of a head, at once

  std::int64_t state_of(std::int64_t token) const { return states_.numbers[token]; }
  std::int64_t parts() const { return shape_.value / kSpan; }
  std::int64_t units() const { return states_.m * shape_.value_heads * parts(); }
  std::int64_t place_of_head(std::int64_t head) const {
    return state_of(head / shape_.value_heads) * states_.heads_stride +
           head % shape_.value_heads * shape_.key * shape_.value;
  }

  // Where a product gives a channel.
  std::int64_t place_of(std::int64_t channel) const {
    if (!shape_.is_by_key_head) return channel;
    const std::int64_t keys = shape_.keys(), values = shape_.each() * shape_.value;
    const std::int64_t group = 2 * (shape_.key + values);
    if (channel < keys) return channel / shape_.key * group + channel % shape_.key;
    channel -= keys;
    if (channel < keys) return channel / shape_.key * group + shape_.key + channel % shape_.key;
    channel -= keys;
    return channel / values * group + 2 * shape_.key + channel % values;
  }
  // The same of a value head's output gates.
  std::int64_t place_of_gate(std::int64_t head) const {
    if (!shape_.is_by_key_head) return shape_.channels() + head * shape_.value;
    const std::int64_t each = shape_.each(), values = each * shape_.value;
    return head / each * 2 * (shape_.key + values) + 2 * shape_.key + values +
           head % each * shape_.value;
  }

  void convolve_some(std::int64_t token, std::int64_t channel) const {
    const std::int64_t channels = shape_.channels(), last = layer_.tap_count - 1;
    std::uint16_t* before = states_.inputs + state_of(token) * states_.inputs_stride + channel;
    const std::uint16_t* taps = layer_.taps + channel;
    Floats sum = zeros();
    for (std::int64_t tap = 0; tap < last; ++tap, before += channels, taps += channels) {
      const Floats values = load_bf16(before);
      sum = times_plus(values, load_bf16(taps), sum);
      if (tap > 0) store_bf16(before - channels, values);
    }
    const Floats values = load_bf16(input_ + token * stride_ + place_of(channel));
    sum = times_plus(values, load_bf16(taps), sum);
    store_bf16(before - channels, values);
    store_bf16(convolved_ + token * channels + channel, Silu::of(sum));
  }

  // Of a head: its query and key, and what its state is multiplied with.
  struct Head {
    const float *query, *key;
    float decay, write;
  };

  // 16 elements at once, divided by the vector's length.
  void load_unit(const std::uint16_t* from, float factor, float* to) const {
    Floats squares = zeros();
    for (std::int64_t i = 0; i < shape_.key; i += kLanes) {
      const Floats values = load_bf16(from + i);
      store_floats(to + i, values);
      squares = times_plus(values, values, squares);
    }
    const Floats scale = spread(factor / std::sqrt(sum_of(squares) + 1e-6f));
    for (std::int64_t i = 0; i < shape_.key; i += kLanes) {
      store_floats(to + i, times(load_floats(to + i), scale));
    }
  }

  Head load_head(std::int64_t token, std::int64_t head) const {
    float* own = scratch(2 * shape_.key, kOwnKeys);
    const std::int64_t each = shape_.each();
    const std::uint16_t* from =
        convolved_ + token * shape_.channels() + head / each * shape_.key;
    load_unit(from, 1.0f / std::sqrt(static_cast<float>(shape_.key)), own);
    load_unit(from + shape_.keys(), 1.0f, own + shape_.key);
    const bool is_by_key = shape_.is_by_key_head;
    const std::uint16_t* gates = gates_ + token * gates_stride_ +
                                 (is_by_key ? head / each * 2 * each + head % each : head);
    const float decay = as_float(gates[is_by_key ? each : shape_.value_heads]);
    return {own, own + shape_.key,
            std::exp(layer_.rates[head] * softplus(decay + layer_.rate_bias[head])),
            write_gate(as_float(gates[0]))};
  }

  template <typename State>
  void update(State* states, int thread, int threads) const {
    const std::int64_t all = units(), parts = this->parts();
    std::int64_t loaded = -1;
    Head own{};
    for (std::int64_t i = all * thread / threads; i < all * (thread + 1) / threads; ++i) {
      const std::int64_t head = i / parts, at = i % parts * kSpan;
      std::uint16_t* given = given_ + head * shape_.value + at;
      const std::int64_t token = head / shape_.value_heads;
      if (state_of(token) <= 0) {
        std::memset(given, 0, kSpan * sizeof(std::uint16_t));
        continue;
      }
      if (head != loaded) own = load_head(token, head % shape_.value_heads);
      loaded = head;
      const std::uint16_t* values = convolved_ + token * shape_.channels() + 2 * shape_.keys() +
                                    head % shape_.value_heads * shape_.value + at;
      update_some(own, values, states + place_of_head(head) + at, given);
    }
  }

  // 32 values of a head.
  template <typename State>
  void update_some(const Head& own, const std::uint16_t* values, State* state,
                   std::uint16_t* given) const {
    const std::int64_t key = shape_.key, stride = shape_.value;
    const Floats decay = spread(own.decay), write = spread(own.write);
    Floats left = zeros(), right = zeros();
    for (std::int64_t i = 0; i < key; ++i) {
      const State* row = state + i * stride;
      const Floats by = spread(own.key[i]);
      left = times_plus(times(load_state(row), decay), by, left);
      right = times_plus(times(load_state(row + kLanes), decay), by, right);
    }
    left = times(minus(load_bf16(values), left), write);
    right = times(minus(load_bf16(values + kLanes), right), write);
    Floats first = zeros(), second = zeros();
    for (std::int64_t i = 0; i < key; ++i) {
      State* row = state + i * stride;
      const Floats by = spread(own.key[i]), query = spread(own.query[i]);
      const Floats one = times_plus(by, left, times(load_state(row), decay));
      const Floats other = times_plus(by, right, times(load_state(row + kLanes), decay));
      store_state(row, one);
      store_state(row + kLanes, other);
      first = times_plus(one, query, first);
      second = times_plus(other, query, second);
    }
    store_bf16(given, first);
    store_bf16(given + kLanes, second);
  }

  template <bool kIsSilu>
  void normalise(std::int64_t token, std::int64_t head) const {
    const std::int64_t value = shape_.value;
    const std::uint16_t* from = given_ + (token * shape_.value_heads + head) * value;
    const std::uint16_t* gate = input_ + token * stride_ + place_of_gate(head);
    Floats squares = zeros();
    for (std::int64_t i = 0; i < value; i += kLanes) {
      const Floats values = load_bf16(from + i);
      squares = times_plus(values, values, squares);
    }
    const float mean = sum_of(squares) / static_cast<float>(value);
    const Floats scale = spread(1.0f / std::sqrt(mean + layer_.epsilon));
    for (std::int64_t i = 0; i < value; i += kLanes) {
      const Floats normed =
          times(times(load_bf16(from + i), scale), load_floats(layer_.head_norm + i));
      const Floats z = load_bf16(gate + i);
      const Floats opened = kIsSilu ? Silu::of(z) : Sigmoid::of(z);
      store_bf16(y_ + places_.at(token, head * value + i), times(normed, opened));
    }
  }

  const GatedDeltaLayer& layer_;
  const GatedDeltaHeads& shape_;
  const LinearStates& states_;
  const std::uint16_t* input_;
  const std::int64_t stride_;
  const std::uint16_t* gates_;
  const std::int64_t gates_stride_;
  std::uint16_t* convolved_;  // [m][channels]
  std::uint16_t* given_;      // [m][value heads][value]
  std::uint16_t* y_;
  const Places places_;
};

}  // namespace ray_hetero::RAY_HETERO_LEVEL

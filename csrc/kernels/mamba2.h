// The part of a mixer of Mamba 2 that has a state, for a token of each request:
//
//   c ← silu(taps · [inputs before | input] + bias)      S ← e^(rate · d) · S + d·v ⊗ k
//   y ← norm((S·q + skip · v) · silu(z))                 with d = softplus(step + bias)
//
// where c is [v | k | q], v of all heads, k and q of all groups, and S [value][state] is the state of
// a head.  A state is read once from memory and written once.
//
// Rounding is that of vLLM's operators for CPUs: c and S·q + skip · v are bf16, their products with
// the gates are not, their norm is before its weight, and a state is what it is stored as.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "activations.h"
#include "layers.h"
#include "linear_states.h"
#include "tokens.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

class Mamba2 {
 public:
  // input [m][stride] is what the product gives, y is as `places` says; `between` has room for
  // elements(), on a cache line.
  Mamba2(const Mamba2Mixer& mixer, const LinearStates& states, const std::uint16_t* input,
         std::int64_t stride, std::uint16_t* between, std::uint16_t* y, const Places& places)
      : mixer_(mixer), shape_(mixer.heads), states_(states), input_(input), stride_(stride),
        gated_(reinterpret_cast<float*>(between)),
        squares_(gated_ + states.m * shape_.values()),
        convolved_(reinterpret_cast<std::uint16_t*>(squares_ + units())), y_(y), places_(places) {}

  // Two for each float.
  static std::int64_t elements(const Mamba2Heads& shape, std::int64_t m) {
    return m * (2 * shape.values() + 2 * (shape.values() / kLanes + 1) + shape.channels());
  }

  // The first states of a thread's share of update().
  ReadAhead ahead(int thread, int threads) const {
    const std::int64_t all = units(), first = all * thread / threads;
    const std::int64_t count = all * (thread + 1) / threads - first, head = first / parts();
    if (count == 0 || state_of(head / shape_.heads) <= 0) return {nullptr, 0};
    const std::int64_t size = states_.is_float ? sizeof(float) : sizeof(std::uint16_t);
    return {static_cast<const std::uint8_t*>(states_.heads) +
                (place_of_head(head) + first % parts() * kLanes * shape_.state) * size,
            count * kLanes * shape_.state * size};
  }

  // Three pieces of work, each once all threads have done the one before.
  void convolve(int thread, int threads) const {
    const std::int64_t parts = shape_.channels() / kLanes, all = states_.m * parts;
    for (std::int64_t i = all * thread / threads; i < all * (thread + 1) / threads; ++i) {
      const std::int64_t token = i / parts;
      if (state_of(token) > 0) convolve_some(token, i % parts * kLanes);
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
    const std::int64_t values = shape_.values(), parts = values / kLanes;
    const std::int64_t size = values / mixer_.norm_groups, all = units();
    std::int64_t normed = -1;
    Floats scale = spread(1.0f);
    for (std::int64_t i = all * thread / threads; i < all * (thread + 1) / threads; ++i) {
      const std::int64_t token = i / parts, at = i % parts * kLanes;
      const std::int64_t group = token * mixer_.norm_groups + at / size;
      const Floats given = load_floats(gated_ + i * kLanes);
      std::uint16_t* y = y_ + places_.at(token, at);
      if (mixer_.norm == nullptr) {
        store_bf16(y, given);
        continue;
      }
      if (group != normed) scale = spread(scale_of_group(group, size));
      normed = group;
      store_bf16(y, times(rounded(times(given, scale)), load_bf16(mixer_.norm + at)));
    }
  }

 private:
  static constexpr std::int64_t kRows = 4;  // of a state, at once

  std::int64_t state_of(std::int64_t token) const { return states_.numbers[token]; }
  // Vectors of values of a head, and of all heads and tokens.
  std::int64_t parts() const { return shape_.value / kLanes; }
  std::int64_t units() const { return states_.m * shape_.heads * parts(); }
  std::int64_t place_of_head(std::int64_t head) const {
    return state_of(head / shape_.heads) * states_.heads_stride +
           head % shape_.heads * shape_.value * shape_.state;
  }

  // 16 elements of what the product gives of a token.
  Floats input(std::int64_t token, std::int64_t at) const {
    const Floats given = load_bf16(input_ + token * stride_ + at);
    if (mixer_.factors == nullptr) return given;
    return rounded(times(given, load_bf16(mixer_.factors + at)));
  }
  // One of them, of a head's step.
  float step(std::int64_t token, std::int64_t head) const {
    const std::int64_t at = shape_.values() + shape_.channels() + head;
    const float given = as_float(input_[token * stride_ + at]);
    if (mixer_.factors == nullptr) return given;
    return as_float(as_bf16(given * as_float(mixer_.factors[at])));
  }

  void convolve_some(std::int64_t token, std::int64_t channel) const {
    const std::int64_t channels = shape_.channels(), last = mixer_.tap_count - 1;
    std::uint16_t* before = states_.inputs + state_of(token) * states_.inputs_stride + channel;
    const std::uint16_t* taps = mixer_.taps + channel;
    Floats sum = mixer_.tap_bias == nullptr ? zeros() : load_floats(mixer_.tap_bias + channel);
    for (std::int64_t tap = 0; tap < last; ++tap, before += channels, taps += channels) {
      const Floats values = load_bf16(before);
      sum = times_plus(values, load_bf16(taps), sum);
      if (tap > 0) store_bf16(before - channels, values);
    }
    const Floats values = input(token, shape_.values() + channel);
    sum = times_plus(values, load_bf16(taps), sum);
    store_bf16(before - channels, values);
    store_bf16(convolved_ + token * channels + channel, Silu::of(sum));
  }

  // Of a head: its group's key and query, and what its state and its values are multiplied with.
  struct Head {
    const std::uint16_t *key, *query;
    float decay, step, skip;
  };

  Head head_of(std::int64_t token, std::int64_t head) const {
    const std::uint16_t* key = convolved_ + token * shape_.channels() + shape_.values() +
                               head / shape_.each() * shape_.state;
    const float step = softplus(this->step(token, head) + mixer_.step_bias[head]);
    return {key, key + shape_.keys(), std::exp(mixer_.rates[head] * step), step,
            mixer_.skips[head]};
  }

  template <typename State>
  void update(State* states, int thread, int threads) const {
    const std::int64_t all = units(), parts = this->parts();
    std::int64_t loaded = -1;
    Head own{};
    for (std::int64_t i = all * thread / threads; i < all * (thread + 1) / threads; ++i) {
      const std::int64_t head = i / parts, token = head / shape_.heads;
      if (state_of(token) <= 0) {
        store_floats(gated_ + i * kLanes, zeros());
        squares_[i] = 0;
        continue;
      }
      if (head != loaded) own = head_of(token, head % shape_.heads);
      loaded = head;
      const std::int64_t at = i * kLanes - token * shape_.values();
      const Floats values = load_bf16(convolved_ + token * shape_.channels() + at);
      State* state = states + place_of_head(head) + i % parts * kLanes * shape_.state;
      const Floats given = rounded(update_some(own, values, state));
      const Floats gated = times(given, Silu::of(input(token, at)));
      store_floats(gated_ + i * kLanes, gated);
      squares_[i] = sum_of(times(gated, gated));
    }
  }

  // What 16 rows of a state give.
  template <typename State>
  Floats update_some(const Head& own, Floats values, State* state) const {
    alignas(64) float written[kLanes], sums[kLanes];
    store_floats(written, times(values, spread(own.step)));
    for (std::int64_t row = 0; row < kLanes; row += kRows) {
      update_rows(own, written + row, state + row * shape_.state, sums + row);
    }
    return times_plus(values, spread(own.skip), load_floats(sums));
  }

  template <typename State>
  void update_rows(const Head& own, const float* written, State* state, float* sums) const {
    const std::int64_t size = shape_.state;
    const Floats decay = spread(own.decay);
    Floats by[kRows], total[kRows];
    for (int row = 0; row < kRows; ++row) {
      by[row] = spread(written[row]);
      total[row] = zeros();
    }
    for (std::int64_t i = 0; i < size; i += kLanes) {
      const Floats key = load_bf16(own.key + i), query = load_bf16(own.query + i);
      for (int row = 0; row < kRows; ++row) {
        State* at = state + row * size + i;
        const Floats next = times_plus(key, by[row], times(load_state(at), decay));
        store_state(at, next);
        total[row] = times_plus(next, query, total[row]);
      }
    }
    for (int row = 0; row < kRows; ++row) sums[row] = sum_of(total[row]);
  }

  // What the values of a group of a token's are multiplied with by their norm.
  float scale_of_group(std::int64_t group, std::int64_t size) const {
    const std::int64_t count = size / kLanes;
    float squares = 0;
    for (std::int64_t i = group * count; i < (group + 1) * count; ++i) squares += squares_[i];
    return 1.0f / std::sqrt(squares / static_cast<float>(size) + mixer_.epsilon);
  }

  const Mamba2Mixer& mixer_;
  const Mamba2Heads& shape_;
  const LinearStates& states_;
  const std::uint16_t* input_;
  const std::int64_t stride_;
  float* gated_;              // [m][heads][value]
  float* squares_;            // [m][heads][value / 16], sums of them
  std::uint16_t* convolved_;  // [m][channels]
  std::uint16_t* y_;
  const Places places_;
};

}  // namespace ray_hetero::RAY_HETERO_LEVEL

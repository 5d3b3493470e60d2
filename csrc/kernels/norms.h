// Norms of tokens and of heads, and sums that norms are taken of.
//
// Rounding is that of vLLM's operators: a root-mean-square norm is rounded before it is weighted and
// after it, the others after it alone; a norm is taken of a sum before that is rounded, in models
// where vLLM's operator adds and normalises at once.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "layers.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

// What a root-mean-square norm multiplies n values with, by the sums of their squares.
inline Floats scale_of(Floats squares, const Norm& norm, std::int64_t n) {
  const float mean = sum_of(squares) / static_cast<float>(n);
  return spread(1.0f / std::sqrt(mean + norm.epsilon));
}

// load(i) gives 16 of n values from the i-th on; store(i, values, normed) takes them.
template <typename Load, typename Store>
inline void layer_norm(const Norm& norm, std::int64_t n, const Load& load, const Store& store) {
  Floats sums = zeros(), squares = zeros();
  for (std::int64_t i = 0; i < n; i += kLanes) sums = plus(sums, load(i));
  const Floats mean = spread(sum_of(sums) / static_cast<float>(n));
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const Floats apart = minus(load(i), mean);
    squares = times_plus(apart, apart, squares);
  }
  const Floats scale = scale_of(squares, norm, n);
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const Floats values = load(i);
    const Floats weighted = times(times(minus(values, mean), scale), load_bf16(norm.weight + i));
    store(i, values, norm.bias == nullptr ? weighted : plus(weighted, load_bf16(norm.bias + i)));
  }
}

template <typename Load, typename Store>
inline void normalise(const Norm& norm, std::int64_t n, const Load& load, const Store& store) {
  if (norm.kind == NormKind::kLayer) return layer_norm(norm, n, load, store);
  Floats squares = zeros();
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const Floats values = load(i);
    squares = times_plus(values, values, squares);
  }
  const Floats scale = scale_of(squares, norm, n), one = spread(1.0f);
  if (norm.kind == NormKind::kPlusOne) {
    for (std::int64_t i = 0; i < n; i += kLanes) {
      const Floats values = load(i);
      store(i, values, times(times(values, scale), plus(load_bf16(norm.weight + i), one)));
    }
    return;
  }
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const Floats values = load(i);
    store(i, values, times(rounded(times(values, scale)), load_bf16(norm.weight + i)));
  }
}

// x ← norm(x), n values in bf16.
inline void normalise_in_place(const Norm& norm, std::int64_t n, std::uint16_t* x) {
  normalise(
      norm, n, [&](std::int64_t i) { return load_bf16(x + i); },
      [&](std::int64_t i, Floats, Floats normed) { store_bf16(x + i, normed); });
}

// x · multiplier as bf16.
inline Floats multiplied(const std::uint16_t* x, float multiplier) {
  const Floats values = load_bf16(x);
  return multiplier == 1 ? values : rounded(times(values, spread(multiplier)));
}

// What is added to a residual: x [m][n] of all tokens, and the residual, or nullptr for none.
struct Addends {
  const std::uint16_t* x;
  const std::uint16_t* residual;
  float multiplier = 1;  // of x
};

// sum ← x · multiplier + residual, y ← norm of it, of one token.  sum is [m][n], y is as `places`
// says; n is a multiple of 16.  sum may be the residual.
inline void add_and_norm(std::int64_t token, const Addends& addends, const Norm& norm,
                         std::uint16_t* sum, std::uint16_t* y, const Places& places) {
  const std::int64_t n = places.stride;
  const std::uint16_t* x = addends.x + token * n;
  const std::uint16_t* residual =
      addends.residual == nullptr ? nullptr : addends.residual + token * n;
  sum += token * n;
  const auto add = [&](std::int64_t i) {
    const Floats value = multiplied(x + i, addends.multiplier);
    if (residual == nullptr) return value;
    const Floats both = plus(value, load_bf16(residual + i));
    return norm.of_rounded ? rounded(both) : both;
  };
  normalise(norm, n, add, [&](std::int64_t i, Floats both, Floats normed) {
    store_bf16(sum + i, both);
    store_bf16(y + places.at(token, i), normed);
  });
}

// A thread's share of the tokens.
inline void add_and_norm_some(int thread, int threads, const Addends& addends, const Norm& norm,
                              std::uint16_t* sum, std::uint16_t* y, const Places& places) {
  for (std::int64_t token = thread; token < places.m; token += threads) {
    add_and_norm(token, addends, norm, sum, y, places);
  }
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

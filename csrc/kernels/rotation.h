// Queries and keys as an attention wants them: each head normalised, in models that do so, and
// rotated by its token's position.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "denormals.h"
#include "layers.h"
#include "norms.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

// Two coordinates that turn together, in place.
inline void rotate_pair(std::uint16_t* first, std::uint16_t* second, float cos, float sin) {
  const float left = as_float(*first), right = as_float(*second);
  *first = as_bf16(left * cos - right * sin);
  *second = as_bf16(right * cos + left * sin);
}

// Elements i and i + rotated / 2 of a head are the coordinates that turn together.
inline void rotate_halves(std::uint16_t* x, const std::uint16_t* cos_sin, std::int64_t rotated) {
  const std::int64_t half = rotated / 2;
  std::int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Floats cos = load_bf16(cos_sin + i), sin = load_bf16(cos_sin + half + i);
    const Floats left = load_bf16(x + i), right = load_bf16(x + half + i);
    store_bf16(x + i, times_minus(left, cos, times(right, sin)));
    store_bf16(x + half + i, times_plus(right, cos, times(left, sin)));
  }
  for (; i < half; ++i) {
    rotate_pair(x + i, x + half + i, as_float(cos_sin[i]), as_float(cos_sin[half + i]));
  }
}

// Elements 2 · i and 2 · i + 1 are.
inline void rotate_neighbours(std::uint16_t* x, const std::uint16_t* cos_sin,
                              std::int64_t rotated) {
  const std::int64_t half = rotated / 2;
  std::int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Floats cos = load_bf16(cos_sin + i), sin = load_bf16(cos_sin + half + i);
    const Floats left = load_firsts(x + 2 * i), right = load_seconds(x + 2 * i);
    store_in_turns(x + 2 * i, times_minus(left, cos, times(right, sin)),
                   times_plus(right, cos, times(left, sin)));
  }
  for (; i < half; ++i) {
    rotate_pair(x + 2 * i, x + 2 * i + 1, as_float(cos_sin[i]), as_float(cos_sin[half + i]));
  }
}

// Some heads of a token, neighbours, in place.
inline void turn_heads(const Rotation& rotation, std::uint16_t* heads, std::int64_t count,
                       const std::optional<Norm>& norm, std::int64_t position) {
  const std::uint16_t* cos_sin = rotation.cos_sin + position * rotation.rotated;
  for (std::int64_t i = 0; i < count; ++i, heads += rotation.size) {
    if (norm) normalise_in_place(*norm, rotation.size, heads);
    if (rotation.rotated == 0) continue;
    if (rotation.is_interleaved) {
      rotate_neighbours(heads, cos_sin, rotation.rotated);
    } else {
      rotate_halves(heads, cos_sin, rotation.rotated);
    }
  }
}

// qkv [m][stride]: queries, then keys, of each token.  One thread for few tokens: to call the
// others together would take longer.
inline void rotate(const Rotation& rotation, std::uint16_t* qkv, std::int64_t stride,
                   const std::int64_t* positions, std::int64_t m) {
#pragma omp parallel if (m > kFewTokens)
  {
    const DenormalsAreZero mode;
#pragma omp for schedule(static)
    for (std::int64_t token = 0; token < m; ++token) {
      std::uint16_t* queries = qkv + token * stride;
      std::uint16_t* keys = queries + rotation.heads * rotation.size;
      turn_heads(rotation, queries, rotation.heads, rotation.query_norm, positions[token]);
      turn_heads(rotation, keys, rotation.kv_heads, rotation.key_norm, positions[token]);
    }
  }
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

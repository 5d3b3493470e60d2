// Queries and keys as an attention wants them: each head normalised, in models that do so, and
// rotated by its token's position.
//
// Rounding is that of vLLM's operators: a norm is rounded before it is weighted, and after it.
//
// Included once for each level, see levels.h.

namespace ray_hetero::RAY_HETERO_LEVEL {

// x ← norm(x) for one head.
inline void norm_head(std::uint16_t* x, const Norm& norm, std::int64_t size) {
  Floats squares = zeros();
  for (std::int64_t i = 0; i < size; i += kLanes) {
    const Floats values = load_bf16(x + i);
    squares = times_plus(values, values, squares);
  }
  const Floats scale = scale_of(squares, norm, size);
  for (std::int64_t i = 0; i < size; i += kLanes) {
    store_normed(x + i, load_bf16(x + i), scale, norm.weight + i);
  }
}

// Elements i and i + rotated / 2 of a head are the coordinates that turn together.
inline void rotate_head(std::uint16_t* x, const std::uint16_t* cos_sin,
                                        std::int64_t rotated) {
  const std::int64_t half = rotated / 2;
  for (std::int64_t i = 0; i < half; i += kLanes) {
    const Floats cos = load_bf16(cos_sin + i), sin = load_bf16(cos_sin + half + i);
    const Floats left = load_bf16(x + i), right = load_bf16(x + half + i);
    store_bf16(x + i, times_minus(left, cos, times(right, sin)));
    store_bf16(x + half + i, times_plus(right, cos, times(left, sin)));
  }
}

// Some heads of a token, neighbours, in place.
inline void turn_heads(const Rotation& rotation, std::uint16_t* heads, std::int64_t count,
                       const std::optional<Norm>& norm, std::int64_t position) {
  const std::uint16_t* cos_sin = rotation.cos_sin + position * rotation.rotated;
  for (std::int64_t i = 0; i < count; ++i, heads += rotation.size) {
    if (norm) norm_head(heads, *norm, rotation.size);
    rotate_head(heads, cos_sin, rotation.rotated);
  }
}

// qkv [m][stride]: queries, then keys, of each token.  One thread for few tokens: to call the
// others together would take longer.
inline void rotate(const Rotation& rotation, std::uint16_t* qkv, std::int64_t stride,
                   const std::int64_t* positions, std::int64_t m) {
#pragma omp parallel for schedule(static) if (m > kFewTokens)
  for (std::int64_t token = 0; token < m; ++token) {
    std::uint16_t* queries = qkv + token * stride;
    std::uint16_t* keys = queries + rotation.heads * rotation.size;
    turn_heads(rotation, queries, rotation.heads, rotation.query_norm, positions[token]);
    turn_heads(rotation, keys, rotation.kv_heads, rotation.key_norm, positions[token]);
  }
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

// Sums of some tokens for the outputs of a block that stay in registers, two vectors for each token.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

// Two rows, each as it is multiplied: 16 outputs left, 16 right.
struct TwoRows {
  Pairs left[2], right[2];
};

template <int M>
struct Sums {
  Floats left[M], right[M];

  RAY_HETERO_INLINE void clear() {
    for (int i = 0; i < M; ++i) left[i] = right[i] = zeros();
  }
  RAY_HETERO_INLINE void load(const float* from, std::int64_t stride) {
    for (int i = 0; i < M; ++i) {
      left[i] = load_floats(from + i * stride);
      right[i] = load_floats(from + i * stride + kLanes);
    }
  }
  RAY_HETERO_INLINE void store(float* to, std::int64_t stride) const {
    for (int i = 0; i < M; ++i) {
      store_floats(to + i * stride, left[i]);
      store_floats(to + i * stride + kLanes, right[i]);
    }
  }
};

template <int M>
RAY_HETERO_INLINE void add_row(const std::uint16_t* x, std::int64_t stride, Pairs left,
                               Pairs right, Sums<M>& sums) {
  for (int i = 0; i < M; ++i) {
    const Pairs both = spread_pair(x + i * stride);
    sums.left[i] = dot(sums.left[i], left, both);
    sums.right[i] = dot(sums.right[i], right, both);
  }
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

// What layers with a linear state have in common: how it is read and written, and how it fades.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

RAY_HETERO_INLINE Floats load_state(const float* at) { return load_floats(at); }
RAY_HETERO_INLINE Floats load_state(const std::uint16_t* at) { return load_bf16(at); }
RAY_HETERO_INLINE void store_state(float* at, Floats values) { store_floats(at, values); }
RAY_HETERO_INLINE void store_state(std::uint16_t* at, Floats values) { store_bf16(at, values); }

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace ray_hetero::RAY_HETERO_LEVEL

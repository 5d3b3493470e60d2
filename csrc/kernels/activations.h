// Activations of MLPs, 16 values at a time.
//
// For a negative value a power may be infinite: a quotient by it is then 0.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

// Functions that a gate goes through, or what has no gate.
struct Silu {
  static Floats of(Floats x) {
    return over(x, plus(spread(1.0f), power_of_two(times(x, spread(-kLog2E)))));
  }
};

struct Sigmoid {
  static Floats of(Floats x) {
    const Floats one = spread(1.0f);
    return over(one, plus(one, power_of_two(times(x, spread(-kLog2E)))));
  }
};

struct Relu {
  static Floats of(Floats x) { return larger_of_first(zeros(), x, kLanes); }
};

struct ReluSquared {
  static Floats of(Floats x) {
    const Floats positive = Relu::of(x);
    return times(positive, positive);
  }
};

// x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³))), where (1 + tanh(u)) / 2 is 1 / (1 + e^-2u).
struct GeluTanh {
  static Floats of(Floats x) {
    constexpr float kTwice = 2 * 0.79788456f * kLog2E;
    const Floats cubic = times_plus(times(times(x, x), spread(0.044715f)), x, x);
    return over(x, plus(spread(1.0f), power_of_two(times(cubic, spread(-kTwice)))));
  }
};

// x · Φ(x) = max(x, 0) − |x| · erfc(|x| / √2) / 2, the complementary error function by formula
// 7.1.26 of Abramowitz and Stegun, "Handbook of Mathematical Functions", good to 1.5e-7.
struct Gelu {
  static Floats of(Floats x) {
    constexpr float kByPower[] = {1.061405429f, -1.453152027f, 1.421413741f, -0.284496736f,
                                  0.254829592f};
    const Floats one = spread(1.0f);
    const Floats magnitude = larger_of_first(minus(zeros(), x), x, kLanes);
    const Floats z = times(magnitude, spread(0.70710678f));
    const Floats t = over(one, times_plus(z, spread(0.3275911f), one));
    Floats sum = zeros();
    for (const float factor : kByPower) sum = times(plus(sum, spread(factor)), t);
    const Floats power = power_of_two(times(times(z, z), spread(-kLog2E)));
    const Floats lost = times(times(magnitude, spread(0.5f)), times(sum, power));
    return minus(Relu::of(x), lost);
  }
};

// y ← f(gate) · up, or f(gate) where up is nullptr.
template <typename Function>
inline void activate(const std::uint16_t* gate, const std::uint16_t* up, std::uint16_t* y) {
  const Floats activated = Function::of(load_bf16(gate));
  store_bf16(y, up == nullptr ? activated : times(activated, load_bf16(up)));
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

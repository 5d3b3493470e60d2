// What lies between the two products of a mixture's expert, 16 values at a time.
//
// Included once for each level, see levels.h; vectors/portable.h makes these formulas plain C++.  The
// list of all is in layers.h.  Those of a gate are f(gate, up), the others f(up).
//
// For a negative value a power may be infinite: a quotient by it is then 0.

#pragma once

#include "this_level.h"

#include "activations.h"
#include "layers.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

RAY_HETERO_INLINE Floats smaller(Floats values, float most) {
  return minus(zeros(), larger_of_first(spread(-most), minus(zeros(), values), kLanes));
}
RAY_HETERO_INLINE Floats within(Floats values, float limit) {
  return larger_of_first(spread(-limit), smaller(values, limit), kLanes);
}

// x · sigmoid(alpha · x)
RAY_HETERO_INLINE Floats gated_by_itself(Floats x, float alpha) {
  return over(x, plus(spread(1.0f), power_of_two(times(x, spread(-kLog2E * alpha)))));
}

// cap · tanh(x / cap), where tanh(u) is 1 − 2 / (1 + e^2u): good to 1e-7 · cap.
RAY_HETERO_INLINE Floats softly_within(Floats x, float cap) {
  const Floats one = spread(1.0f), power = power_of_two(times(x, spread(2 * kLog2E / cap)));
  return times(spread(cap), minus(one, over(spread(2.0f), plus(one, power))));
}

// gate · sigmoid(alpha · gate) · (up + beta), both limited before: the gate from above.
struct Swiglu {
  RAY_HETERO_INLINE static Floats of(const Activation& figures, Floats gate, Floats up) {
    if (figures.limit < std::numeric_limits<float>::infinity()) {
      gate = smaller(gate, figures.limit);
      up = within(up, figures.up_limit);
    }
    return times(gated_by_itself(gate, figures.alpha), plus(up, spread(figures.beta)));
  }
};

// gate · sigmoid(gate) · up, where the first product is limited from above, and up on both sides.
struct SwigluStep {
  RAY_HETERO_INLINE static Floats of(const Activation& figures, Floats gate, Floats up) {
    return times(smaller(gated_by_itself(gate, 1), figures.limit), within(up, figures.up_limit));
  }
};

// limit · tanh(gate / limit) · sigmoid(gate) · up, where up may be limited so too.
struct Situ {
  RAY_HETERO_INLINE static Floats of(const Activation& figures, Floats gate, Floats up) {
    const Floats power = power_of_two(times(gate, spread(-kLog2E)));
    const Floats open = over(softly_within(gate, figures.limit), plus(spread(1.0f), power));
    const bool is_limited = figures.up_limit < std::numeric_limits<float>::infinity();
    return times(open, is_limited ? softly_within(up, figures.up_limit) : up);
  }
};

template <typename Function>
struct GatedBy {
  RAY_HETERO_INLINE static Floats of(const Activation&, Floats gate, Floats up) {
    return times(Function::of(gate), up);
  }
};
using GatedGelu = GatedBy<Gelu>;
using GatedGeluTanh = GatedBy<GeluTanh>;

using SiluAlone = Silu;
using GeluAlone = Gelu;
using GeluTanhAlone = GeluTanh;
using ReluSquaredAlone = ReluSquared;

}  // namespace ray_hetero::RAY_HETERO_LEVEL

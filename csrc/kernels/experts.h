// The routed experts of a mixture layer, in one call:
//
//   y = Σ w · (D·activation(G·x, U·x) + b)  over the experts that were chosen for a token.
//
// Included once for each level, see levels.h.
//
// Only the experts that some token chose are read, each once (expert_product.h).  An expert's tokens
// are gathered in groups of 32 (expert_tokens.h).  A block of the first product holds 16 outputs of
// the gate and their 16 of up, or 32 of up where there is no gate; so the thread that has summed it
// applies the activation (expert_activations.h).
//
// Sums are taken in an order that depends neither on the number of threads nor on chance: parts of a
// block one after the other, then a token's experts as they were chosen.

#pragma once

#include "this_level.h"

#include "expert_activations.h"
#include "expert_product.h"
#include "expert_tokens.h"
#include "layers.h"
#include "routing.h"
#include "scratch.h"
#include "team.h"
#include "work_queue.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

class ExpertLayer {
 public:
  ExpertLayer(const Experts& experts, const RoutedTokens& step, const Routing& routing)
      : experts_(experts), step_(step), routing_(routing), hidden_(experts.hidden()),
        inner_(experts.inner()),
        gathered_(routing.most() > 1 ? scratch_bf16(routing.places() * hidden_, kGathered)
                                     : nullptr),
        activated_(scratch_bf16(routing.places() * inner_, kActivated)),
        results_(scratch(routing.places() * hidden_, kResults)),
        gate_up_(experts, &Expert::gate_up, routing, TokensOfStep{this}, StoreActivated{this},
                 kSums),
        down_(experts, &Expert::down, routing, TokensActivated{this}, StoreResults{this},
              kPartial) {}
  ExpertLayer(const ExpertLayer&) = delete;  // its products refer to it
  ExpertLayer& operator=(const ExpertLayer&) = delete;

  void run() {
    const auto reserve = [&] {
      gate_up_.reserve_own();
      down_.reserve_own();
    };
    together(reserve, [&](int thread, int threads, Barrier& barrier) {
      if (gathered_ != nullptr) {
        gather(thread, threads);
        ReadAhead gate_up = gate_up_.ahead(thread);
        barrier.wait(gate_up);
      }
      gate_up_.work(thread);
      ReadAhead down = down_.ahead(thread);
      barrier.wait(down);
      down_.work(thread);
      ReadAhead nothing(nullptr, 0);
      barrier.wait(nothing);
      add_experts(thread, threads);
    });
  }

 private:
  struct TokensOfStep {
    const ExpertLayer* layer;
    ExpertTokens operator()(std::int64_t number) const {
      const Routing& routing = layer->routing_;
      const std::int64_t first = routing.first(number), k = layer->hidden_;
      // A token alone lies as it would in a group.
      const std::uint16_t* data = layer->gathered_ != nullptr
                                      ? layer->gathered_ + first * k
                                      : layer->step_.x + routing.token(first) * layer->step_.stride;
      return {data, routing.tokens(number), k};
    }
  };
  struct TokensActivated {
    const ExpertLayer* layer;
    ExpertTokens operator()(std::int64_t number) const {
      const std::int64_t first = layer->routing_.first(number), k = layer->inner_;
      return {layer->activated_ + first * k, layer->routing_.tokens(number), k};
    }
  };
  struct StoreActivated {
    const ExpertLayer* layer;
    void operator()(std::int64_t number, std::int64_t block, std::int64_t first,
                    std::int64_t count, const float* sums) const {
      switch (layer->experts_.activation.formula) {
#define RAY_HETERO_ACTIVATION(name, says, gated) \
  case ExpertActivation::k##name:                \
    return store<name, gated>(number, block, first, count, sums);
        RAY_HETERO_EXPERT_ACTIVATIONS(RAY_HETERO_ACTIVATION)
#undef RAY_HETERO_ACTIVATION
      }
    }
    template <typename Formula, bool kIsGated>
    void store(std::int64_t number, std::int64_t block, std::int64_t first, std::int64_t count,
               const float* sums) const {
      const Experts& experts = layer->experts_;
      const std::int64_t inner = layer->inner_, tokens = layer->routing_.tokens(number);
      const float* bias = experts.gate_up_bias;
      if (bias != nullptr) {
        bias += layer->routing_.expert(number) * experts.gate_up_outputs() + block * kBlock;
      }
      std::uint16_t* to = layer->activated_ + layer->routing_.first(number) * inner;
      for (std::int64_t token = first; token < first + count; ++token, sums += kBlock) {
        Floats left = load_floats(sums), right = load_floats(sums + kLanes);
        if (bias != nullptr) {
          left = plus(left, load_floats(bias));
          right = plus(right, load_floats(bias + kLanes));
        }
        if constexpr (kIsGated) {
          store_bf16(to + place_among(token, tokens, inner, block * kLanes),
                     Formula::of(experts.activation, left, right));
        } else {
          const std::int64_t at = block * kBlock;
          store_bf16(to + place_among(token, tokens, inner, at), Formula::of(left));
          store_bf16(to + place_among(token, tokens, inner, at + kLanes), Formula::of(right));
        }
      }
    }
  };
  struct StoreResults {
    const ExpertLayer* layer;
    void operator()(std::int64_t number, std::int64_t block, std::int64_t first,
                    std::int64_t count, const float* sums) const {
      const std::int64_t hidden = layer->hidden_, at = block * kBlock;
      const float* bias = layer->experts_.down_bias;
      if (bias != nullptr) bias += layer->routing_.expert(number) * hidden + at;
      float* to = layer->results_ + (layer->routing_.first(number) + first) * hidden + at;
      for (std::int64_t token = 0; token < count; ++token, sums += kBlock, to += hidden) {
        for (int half = 0; half < kBlock; half += kLanes) {
          const Floats sum = load_floats(sums + half);
          store_floats(to + half, bias == nullptr ? sum : plus(sum, load_floats(bias + half)));
        }
      }
    }
  };

  // A thread's share of the copies of tokens, 64 bytes at a time.
  void gather(int thread, int threads) const {
    constexpr std::int64_t kPiece = 2 * kTile;
    const std::int64_t pieces = hidden_ / kPiece, all = routing_.places() * pieces;
    const std::int64_t end = all * (thread + 1) / threads;
    std::int64_t number = 0;
    for (std::int64_t i = all * thread / threads; i < end;) {
      const std::int64_t place = i / pieces, last = std::min((place + 1) * pieces, end);
      while (routing_.first(number + 1) <= place) ++number;
      const std::int64_t first = routing_.first(number), tokens = routing_.tokens(number);
      const std::uint16_t* from = step_.x + routing_.token(place) * step_.stride;
      for (; i < last; ++i) {
        const std::int64_t at = i % pieces * kPiece;
        store_pairs(gathered_ + first * hidden_ + place_among(place - first, tokens, hidden_, at),
                    load_pairs(from + at));
      }
    }
  }

  // A thread's share of y.
  void add_experts(int thread, int threads) const {
    const std::int64_t parts = hidden_ / kLanes, all = step_.m * parts;
    for (std::int64_t i = all * thread / threads; i < all * (thread + 1) / threads; ++i) {
      const std::int64_t token = i / parts, at = i % parts * kLanes;
      Floats sum = zeros();
      for (std::int64_t one = 0; one < step_.chosen; ++one) {
        const std::int64_t place = routing_.place(token, one);
        if (place < 0) continue;
        const Floats result = load_floats(results_ + place * hidden_ + at);
        sum = step_.weights == nullptr
                  ? plus(sum, result)
                  : times_plus(result, spread(step_.weights[token * step_.chosen + one]), sum);
      }
      store_bf16(step_.y + i * kLanes, sum);
    }
  }

  const Experts& experts_;
  const RoutedTokens& step_;
  const Routing& routing_;
  const std::int64_t hidden_, inner_;
  std::uint16_t *gathered_, *activated_;  // [places][hidden] and [places][inner], in groups
  float* results_;                        // [places][hidden]
  ExpertProduct<TokensOfStep, StoreActivated> gate_up_;
  ExpertProduct<TokensActivated, StoreResults> down_;
};

// Tokens at once, which bounds the memory for what is between the products.
inline std::int64_t most_tokens(const Experts& experts, std::int64_t chosen) {
  constexpr std::int64_t kResultBytes = 128 << 20;
  const std::int64_t a_token = chosen * experts.hidden() * static_cast<std::int64_t>(sizeof(float));
  return std::max(kResultBytes / a_token / kFewTokens, kPieceTokens / kFewTokens) * kFewTokens;
}

inline void run(const Experts& experts, const RoutedTokens& given) {
  RoutedTokens step = given;
  const std::int64_t most = most_tokens(experts, given.chosen);
  for (std::int64_t left = given.m; left > 0; left -= step.m) {
    step.m = std::min(left, most);
    const Routing routing(step.ids, step.m, step.chosen,
                          static_cast<std::int64_t>(experts.experts.size()));
    ExpertLayer(experts, step, routing).run();
    step.x += step.m * step.stride;
    step.ids += step.m * step.chosen;
    if (step.weights != nullptr) step.weights += step.m * step.chosen;
    step.y += step.m * experts.hidden();
  }
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

// A layer with a Gated DeltaNet, up to the norm before its experts or with its MLP, in one parallel
// region:
//
//   r ← r + h    [q, k, v, z] ← I·norm(r)    [β, decay] ← G·norm(r)    a ← gated_delta.h of these
//   r ← r + O·a
//
// Rounding is that of vLLM's operators: what each gives is bf16.  Of a tensor-parallel group I, G and
// O are of the rank's heads; the sums of O·a over all ranks are rounded once.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "few_tokens.h"
#include "gated_delta.h"
#include "layers.h"
#include "post_attention.h"
#include "scratch.h"
#include "team.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

class GatedDeltaStep {
 public:
  GatedDeltaStep(const GatedDeltaLayer& layer, const LinearStates& states, const Step& step)
      : layer_(layer), step_(step), m_(states.m), normed_places_{m_, layer.input.w.k(), kHasTiles},
        value_places_{m_, layer.heads.values(), kHasTiles} {
    Product::reserve(layer.input, m_);
    Product::reserve(layer.gates, m_);
    PostAttentionBlock::reserve(layer.behind, m_);
    const std::int64_t inputs = layer.input.w.n(), gates = layer.gates.w.n();
    const std::int64_t between = GatedDelta::elements(layer.heads, m_);
    normed_ = scratch_bf16(normed_places_.elements() + (inputs + gates) * m_ +
                               value_places_.elements() + between,
                           kStates);
    std::uint16_t* input = normed_ + normed_places_.elements();
    std::uint16_t* gate = input + inputs * m_;
    std::uint16_t* values = gate + gates * m_;
    input_task_ = task_of(layer.input, normed_, normed_places_, input);
    input_.emplace(layer.input, input_task_, nullptr);
    gates_task_ = task_of(layer.gates, normed_, normed_places_, gate);
    gates_.emplace(layer.gates, gates_task_, nullptr);
    delta_.emplace(layer, states, input, inputs, gate, gates, values + value_places_.elements(),
                   values, value_places_);
    behind_.emplace(layer.behind, values, value_places_, step.sum, step.sum, step.y, nullptr);
  }
  GatedDeltaStep(const GatedDeltaStep&) = delete;  // its products refer to it
  GatedDeltaStep& operator=(const GatedDeltaStep&) = delete;

  void run() {
    together([this] { reserve_own(); },
             [this](int thread, int threads, Barrier& barrier) { work(thread, threads, barrier); });
    if (layer_.behind.sums != nullptr) layer_.behind.sums->check();
  }

 private:
  // A thread's own memory.
  void reserve_own() const {
    FewTokens::reserve_own(input_task_);
    FewTokens::reserve_own(gates_task_);
    GatedDelta::reserve_own(layer_.heads);
    behind_->reserve_own();
  }

  void work(int thread, int threads, Barrier& barrier) {
    ReadAhead input = input_->ahead(thread);
    add_and_norm_some(thread, threads, {step_.hidden, step_.residual}, layer_.norm, step_.sum,
                      normed_, normed_places_);
    barrier.wait(input);
    gates_->work(thread, threads);
    input_->work(thread, threads);
    ReadAhead states = delta_->ahead(thread, threads);
    barrier.wait(states);
    delta_->convolve(thread, threads);
    barrier.wait(states);
    delta_->update(thread, threads);
    ReadAhead output = behind_->ahead(thread);
    barrier.wait(output);
    delta_->finish(thread, threads);
    barrier.wait(output);
    behind_->work(thread, threads, barrier);
  }

  const GatedDeltaLayer& layer_;
  const Step& step_;
  const std::int64_t m_;
  const Places normed_places_, value_places_;
  std::uint16_t* normed_;
  Task input_task_{}, gates_task_{};
  std::optional<Product> input_, gates_;
  std::optional<GatedDelta> delta_;
  std::optional<PostAttentionBlock> behind_;
};

inline void run(const GatedDeltaLayer& layer, const LinearStates& states, const Step& step) {
  GatedDeltaStep(layer, states, step).run();
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

// A mixer of Mamba 2 in one parallel region:
//
//   [z, v, k, q, step] ← I·x      a ← mamba2.h of these      y ← O·a
//
// Rounding is that of vLLM's operators: what each gives is bf16.  Of a tensor-parallel group I and O
// are of the rank's heads; the sums of O·a over all ranks are rounded once.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "few_tokens.h"
#include "layers.h"
#include "mamba2.h"
#include "post_attention.h"
#include "scratch.h"
#include "sum_over_ranks.h"
#include "team.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

class Mamba2Step {
 public:
  Mamba2Step(const Mamba2Mixer& mixer, const LinearStates& states, const Step& step)
      : mixer_(mixer), step_(step), m_(states.m),
        value_places_{m_, mixer.heads.values(), kHasTiles},
        place_(mixer.sums == nullptr ? 0 : mixer.sums->first_place(1)) {
    Product::reserve(mixer.input, m_);
    Product::reserve(mixer.output, m_);
    const std::int64_t between = Mamba2::elements(mixer.heads, m_), inputs = mixer.input.w.n();
    std::uint16_t* memory =
        scratch_bf16(between + value_places_.elements() + inputs * m_, kStates);
    std::uint16_t* values = memory + between;
    std::uint16_t* input = values + value_places_.elements();
    input_task_ = task_of(mixer.input, step.hidden, {m_, mixer.input.w.k(), false}, input);
    input_.emplace(mixer.input, input_task_, nullptr);
    mamba_.emplace(mixer, states, input, inputs, memory, values, value_places_);
    output_task_ = task_of(mixer.output, values, value_places_, step.y,
                           mixer.sums == nullptr ? nullptr : mixer.sums->partial(place_));
    output_.emplace(mixer.output, output_task_, nullptr);
  }
  Mamba2Step(const Mamba2Step&) = delete;  // its products refer to it
  Mamba2Step& operator=(const Mamba2Step&) = delete;

  void run() {
    together(
        [this] {
          FewTokens::reserve_own(input_task_);
          FewTokens::reserve_own(output_task_);
        },
        [this](int thread, int threads, Barrier& barrier) { work(thread, threads, barrier); });
    if (mixer_.sums != nullptr) mixer_.sums->check();
  }

 private:
  void work(int thread, int threads, Barrier& barrier) {
    input_->work(thread, threads);
    ReadAhead states = mamba_->ahead(thread, threads);
    barrier.wait(states);
    mamba_->convolve(thread, threads);
    barrier.wait(states);
    mamba_->update(thread, threads);
    ReadAhead output = output_->ahead(thread);
    barrier.wait(output);
    mamba_->finish(thread, threads);
    barrier.wait(output);
    output_->work(thread, threads);
    if (mixer_.sums == nullptr) return;
    ReadAhead nothing(nullptr, 0);
    sum_over_ranks(thread, threads, barrier, nothing, *mixer_.sums, place_,
                   m_ * mixer_.output.w.n(), step_.y);
  }

  const Mamba2Mixer& mixer_;
  const Step& step_;
  const std::int64_t m_;
  const Places value_places_;
  const int place_;  // of the sums over ranks
  Task input_task_{}, output_task_{};
  std::optional<Product> input_, output_;
  std::optional<Mamba2> mamba_;
};

inline void run(const Mamba2Mixer& mixer, const LinearStates& states, const Step& step) {
  Mamba2Step(mixer, states, step).run();
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

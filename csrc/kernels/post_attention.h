// What a decoder layer computes from one attention to the next, for a decode step:
//
//   r ← r + O·a      h ← D·(silu(G·n) ∘ (U·n))  with n = norm(r)      r ← r + h      q ← Q·norm(r)
//
// in one parallel region, adapters of the products included; other models have another activation, no
// gate, norms of what is added to the residual, or the MLP beside the attention: n = norm(r)
// before O·a is added.  As operators of their own, what lies between the products costs a step little
// arithmetic and much waiting: for the threads to be called together, and for instructions that a
// layer's weights have driven out of the caches.
//
// Rounding is that of vLLM's operators: products, norms and sums of residuals are bf16.  Of a
// tensor-parallel group O and D are the rank's parts, whose sums over all ranks are rounded once.
//
// Where a GPU computes the last columns of an MLP (column_share.h), those of G and U are left out, and
// D multiplies what comes instead behind its own.  Last outputs of D may come too.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "activations.h"
#include "adapters.h"
#include "few_tokens.h"
#include "layers.h"
#include "norms.h"
#include "rank_sums.h"
#include "scratch.h"
#include "sum_over_ranks.h"
#include "team.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

inline Task task_of(const Linear& linear, const std::uint16_t* from, const Places& places,
                    std::uint16_t* to, float* partial = nullptr) {
  return {from, linear.w, linear.bias, to, places.m, linear.w.k(), places.are_tiles, partial, 0,
          places.more};
}

class PostAttentionBlock {
 public:
  // attended [m][output.w.k()] at `places`, residual [m][hidden] → sum [m][hidden],
  // y [m][outputs()], all bf16; sum may be the residual.  reserve() must have been called for all
  // that work at the same time.  The ranks of a group add up in the order in which they make these.
  PostAttentionBlock(const PostAttention& layer, const std::uint16_t* attended, const Places& places,
                    const std::uint16_t* residual, std::uint16_t* sum, std::uint16_t* y,
                    AdapterSlots slots, ColumnShare* share = nullptr, std::int64_t kept = 0,
                    std::int64_t kept_outputs = 0)
      : layer_(layer), share_(layer.has_mlp() ? share : nullptr),
        columns_(share_ == nullptr ? layer.inner() : kept * kBlock),
        own_outputs_(share_ == nullptr || kept_outputs == 0 ? layer.output.w.n()
                                                            : kept_outputs * kBlock),
        residual_(residual),
        normed_places_{places.m, layer.output.w.n(), kHasTiles,
                       share_ == nullptr ? 0 : share_->more(places.m)},
        gated_places_{places.m, layer.inner(), kHasTiles}, sum_(sum), y_(y),
        projected_(scratch_bf16(elements(layer, places.m), kBetween)),
        normed_(share_ == nullptr ? projected_ + normed_places_.elements() : share_->inputs()),
        gate_up_(projected_ + 2 * normed_places_.elements()),
        gated_(gate_up_ + 2 * gated_places_.elements()),
        sum_between_(layer.next ? gated_ + gated_places_.elements() : sum),
        first_place_(layer.sums == nullptr ? 0 : layer.sums->first_place(layer.has_mlp() ? 2 : 1)),
        output_task_(task_of(layer.output, attended, places, projected_, partial(kOutput))),
        output_(layer.output, output_task_, slots) {
    if (layer.has_mlp()) {
      up_task_ = task_of(layer.gate_up, normed_, normed_places_, gate_up_);
      if (share_ != nullptr) up_task_.w = layer.gate_up_of(kept);
      down_task_ = task_of(layer.down, gated_, gated_places_, layer.next ? projected_ : y,
                           partial(kDown));
      if (are_outputs_shared()) {
        down_task_.w = layer.down_of(kept_outputs);
        down_task_.y_stride = layer.output.w.n();
      }
      up_.emplace(layer.gate_up, up_task_, slots);
      down_.emplace(layer.down, down_task_, slots);
    }
    if (layer.next) {
      next_task_ = task_of(layer.next->qkv, normed_, normed_places_, y);
      next_.emplace(layer.next->qkv, next_task_, slots);
    }
  }
  PostAttentionBlock(const PostAttentionBlock&) = delete;  // its products refer to its tasks
  PostAttentionBlock& operator=(const PostAttentionBlock&) = delete;

  // What the scratch memory gives must not move while the products share it.
  static void reserve(const PostAttention& layer, std::int64_t m) {
    scratch_bf16(elements(layer, m), kBetween);
    Product::reserve(layer.output, m);
    if (layer.has_mlp()) {
      Product::reserve(layer.gate_up, m);
      Product::reserve(layer.down, m);
    }
    if (layer.next) Product::reserve(layer.next->qkv, m);
  }

  // A thread's own memory, which it has to have before it begins to work.
  void reserve_own() const {
    FewTokens::reserve_own(output_task_);
    if (layer_.has_mlp()) {
      FewTokens::reserve_own(up_task_);
      FewTokens::reserve_own(down_task_);
    }
    if (next_) FewTokens::reserve_own(next_task_);
  }

  // A thread's share; all of the team's have to come.  False if a rank of the group is missing, as
  // RankSums knows then: nothing is to be computed any more.
  bool work(int thread, int threads, Barrier& barrier) {
    if (layer_.is_parallel) norm_residual(thread, threads);
    output_.work(thread, threads);
    ReadAhead up = up_ ? up_->ahead(thread) : ReadAhead(nullptr, 0);
    output_.finish(thread, threads, barrier, up);
    if (!project(thread, threads, barrier, up, kOutput, projected_)) return false;
    if (layer_.is_parallel) {
      if (share_ != nullptr && thread == 0) share_->ask();
      add(thread, threads);
    } else if (up_) {
      norm(thread, threads, residual_, layer_.output_norm, layer_.norm, sum_between_);
      barrier.wait(up, [this] {
        if (share_ != nullptr) share_->ask();
      });
    } else {
      const Places rows{normed_places_.m, normed_places_.stride, false};
      norm(thread, threads, residual_, layer_.output_norm, layer_.norm, sum_, y_, rows);
      return true;
    }
    up_->work(thread, threads);
    ReadAhead down = down_->ahead(thread);
    up_->finish(thread, threads, barrier, down);
    barrier.wait(down, [&] {
      if (share_ != nullptr) share_->await(down);
    });
    activate_some(thread, threads);
    if (share_ != nullptr) {
      if (share_->is_lost()) return false;
      take_columns(thread, threads);
    }
    barrier.wait(down);
    down_->work(thread, threads);
    ReadAhead next = next_ ? next_->ahead(thread) : ReadAhead(nullptr, 0);
    down_->finish(thread, threads, barrier, next);
    if (are_outputs_shared()) {
      barrier.wait(next, [&] { share_->await_outputs(next); });
      if (share_->is_lost()) return false;
      take_outputs(thread, threads);
    }
    if (!next_) return end(thread, threads, barrier);
    if (!project(thread, threads, barrier, next, kDown, projected_)) return false;
    norm(thread, threads, sum_between_, layer_.down_norm, layer_.next->norm, sum_);
    barrier.wait(next);
    next_->work(thread, threads);
    ReadAhead nothing(nullptr, 0);
    next_->finish(thread, threads, barrier, nothing);
    return true;
  }

  // The first weights of this thread's share.
  ReadAhead ahead(int thread) const { return output_.ahead(thread); }

 private:
  static std::int64_t elements(const PostAttention& layer, std::int64_t m) {
    return (3 * layer.output.w.n() + 3 * layer.inner()) * m;
  }

  // What the ranks of a group project, in turns.
  enum Sum { kOutput, kDown };
  int place(Sum sum) const { return (first_place_ + sum) % 2; }
  // Where they write it.
  float* partial(Sum sum) const {
    return layer_.sums == nullptr ? nullptr : layer_.sums->partial(place(sum));
  }

  // Have what all threads have projected be in `to`, of all ranks; false if one is missing.
  bool project(int thread, int threads, Barrier& barrier, ReadAhead& ahead, Sum sum,
               std::uint16_t* to) const {
    if (layer_.sums != nullptr) {
      return sum_over_ranks(thread, threads, barrier, ahead, *layer_.sums, place(sum),
                            normed_places_.elements(), to);
    }
    barrier.wait(ahead);
    return true;
  }

  // `own` is the norm of what is added.
  void norm(int thread, int threads, const std::uint16_t* residual, const std::optional<Norm>& own,
            const Norm& norm, std::uint16_t* sum, std::uint16_t* y, const Places& places) const {
    const std::int64_t n = places.stride;
    for (std::int64_t token = thread; token < places.m; token += threads) {
      if (own) normalise_in_place(*own, n, projected_ + token * n);
      add_and_norm(token, {projected_, residual, layer_.multiplier}, norm, sum, y, places);
    }
  }

  void norm(int thread, int threads, const std::uint16_t* residual, const std::optional<Norm>& own,
            const Norm& how, std::uint16_t* sum) const {
    norm(thread, threads, residual, own, how, sum, normed_, normed_places_);
  }

  void norm_residual(int thread, int threads) const {
    const std::int64_t n = normed_places_.stride;
    for (std::int64_t token = thread; token < normed_places_.m; token += threads) {
      normalise(
          layer_.norm, n, [&](std::int64_t i) { return load_bf16(residual_ + token * n + i); },
          [&](std::int64_t i, Floats, Floats normed) {
            store_bf16(normed_ + normed_places_.at(token, i), normed);
          });
    }
  }

  void add(int thread, int threads) const {
    const std::int64_t n = normed_places_.stride;
    for (std::int64_t token = thread; token < normed_places_.m; token += threads) {
      for (std::int64_t i = token * n; i < (token + 1) * n; i += kLanes) {
        const Floats added = multiplied(projected_ + i, layer_.multiplier);
        store_bf16(sum_between_ + i, plus(added, load_bf16(residual_ + i)));
      }
    }
  }

  // What is added to the residual by whoever comes; false if a rank is missing.
  bool end(int thread, int threads, Barrier& barrier) const {
    const bool changes = layer_.down_norm || layer_.multiplier != 1;
    if (layer_.sums == nullptr && !changes) return true;
    ReadAhead nothing(nullptr, 0);
    if (!project(thread, threads, barrier, nothing, kDown, y_)) return false;
    if (!changes) return true;
    const std::int64_t n = normed_places_.stride;
    for (std::int64_t token = thread; token < normed_places_.m; token += threads) {
      std::uint16_t* y = y_ + token * n;
      if (layer_.down_norm) normalise_in_place(*layer_.down_norm, n, y);
      for (std::int64_t i = 0; i < n; i += kLanes) {
        store_bf16(y + i, multiplied(y + i, layer_.multiplier));
      }
    }
    return true;
  }

  void activate_some(int thread, int threads) const {
    switch (layer_.activation) {
      case MlpActivation::kSilu: return activate_some<Silu>(thread, threads);
      case MlpActivation::kGelu: return activate_some<Gelu>(thread, threads);
      case MlpActivation::kGeluTanh: return activate_some<GeluTanh>(thread, threads);
      case MlpActivation::kRelu: return activate_some<Relu>(thread, threads);
      case MlpActivation::kReluSquared: return activate_some<ReluSquared>(thread, threads);
    }
  }

  template <typename Function>
  void activate_some(int thread, int threads) const {
    const std::int64_t wide = columns_, parts = wide / kLanes;
    const std::int64_t all = gated_places_.m * parts;
    const bool is_gated = layer_.is_gated();
    for (std::int64_t i = all * thread / threads; i < all * (thread + 1) / threads; ++i) {
      const std::int64_t token = i / parts, at = i % parts * kLanes;
      const std::uint16_t* from = gate_up_ + token * (is_gated ? 2 : 1) * wide + at;
      activate<Function>(from, is_gated ? from + wide : nullptr,
                         gated_ + gated_places_.at(token, at));
    }
  }

  // What a GPU has computed, where `down` reads it.
  void take_columns(int thread, int threads) const {
    const std::int64_t wide = gated_places_.stride - columns_, parts = wide / kLanes;
    const std::int64_t all = gated_places_.m * parts;
    for (std::int64_t i = all * thread / threads; i < all * (thread + 1) / threads; ++i) {
      const std::int64_t token = i / parts, at = i % parts * kLanes;
      std::memcpy(gated_ + gated_places_.at(token, columns_ + at),
                  share_->columns() + token * wide + at, kLanes * sizeof(std::uint16_t));
    }
  }

  bool are_outputs_shared() const { return own_outputs_ < normed_places_.stride; }
  // Outputs of the MLP that a GPU has computed, behind those of the cores.
  void take_outputs(int thread, int threads) const {
    const std::int64_t wide = normed_places_.stride - own_outputs_;
    for (std::int64_t token = thread; token < normed_places_.m; token += threads) {
      std::memcpy(down_task_.y_of(token) + own_outputs_, share_->outputs() + token * wide,
                  wide * sizeof(std::uint16_t));
    }
  }

  const PostAttention& layer_;
  ColumnShare* const share_;        // of the MLP's columns, if a GPU computes some
  const std::int64_t columns_;      // of the MLP that the cores compute
  const std::int64_t own_outputs_;  // the same of its outputs
  const std::uint16_t* residual_;
  const Places normed_places_, gated_places_;
  std::uint16_t *sum_, *y_;
  std::uint16_t *projected_, *normed_, *gate_up_, *gated_, *sum_between_;
  const int first_place_;  // of the sums over ranks
  Task output_task_, up_task_{}, down_task_{}, next_task_{};
  Product output_;
  std::optional<Product> up_, down_, next_;
};

// More tokens than a decode step should have are computed in several parts.
inline void run(const PostAttention& layer, const std::uint16_t* attended,
                const std::uint16_t* residual, std::int64_t m, std::uint16_t* sum,
                std::uint16_t* y, AdapterSlots slots) {
  slots = used(slots, m);
  for (std::int64_t left = m; left > 0; left -= std::min(left, kFewTokens)) {
    const std::int64_t tokens = std::min(left, kFewTokens);
    PostAttentionBlock::reserve(layer, tokens);
    const Places places{tokens, layer.output.w.k(), false};
    PostAttentionBlock block(layer, attended, places, residual, sum, y, slots);
    together([&] { block.reserve_own(); },
             [&](int thread, int threads, Barrier& barrier) {
               block.work(thread, threads, barrier);
             });
    if (layer.sums != nullptr) layer.sums->check();
    attended += tokens * layer.output.w.k();
    residual += tokens * layer.output.w.n();
    sum += tokens * layer.output.w.n();
    y += tokens * layer.outputs();
    if (slots != nullptr) slots += tokens;
  }
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

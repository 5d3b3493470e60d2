// What low-rank adapters of requests add to the products of linear layers, for a decode step.
//
// Each token may have an adapter of its own, or none.  Its part is two small products: A · x, as
// soon as x is there, beside the product of the layer's weights; B · (A · x) once all threads have
// come.  Their weights are a hundredth of the layer's, and are read where they lie.
//
// Rounding is that of vLLM's operators: A · x is rounded to bf16, so is B · (A · x), and the sum with
// the layer's product.  Of a tensor-parallel group the last two are rounded with the sum over ranks.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "few_tokens.h"
#include "layers.h"
#include "team.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

// The slots of a step's tokens, or nullptr if none has an adapter.
inline AdapterSlots used(AdapterSlots slots, std::int64_t m) {
  if (slots == nullptr) return nullptr;
  const bool is_any = std::any_of(slots, slots + m, [](std::int64_t slot) { return slot >= 0; });
  return is_any ? slots : nullptr;
}

// 16 elements in bf16, or as many as there are left, and zeros behind.
inline Floats load_some(const std::uint16_t* from, std::int64_t left) {
  if (left >= kLanes) return load_bf16(from);
  std::uint16_t some[kLanes] = {};
  std::memcpy(some, from, left * sizeof(std::uint16_t));
  return load_bf16(some);
}

// What adapters add to a product.
class Addition {
 public:
  Addition(const Adapters& adapters, const Task& task, AdapterSlots slots)
      : adapters_(adapters), task_(task), slots_(adapters.slices.empty() ? nullptr : slots),
        shrunk_(slots_ == nullptr ? nullptr : reserve(adapters, task.m)) {}

  // Memory between the two products; steps that share it have to reserve it before the first begins.
  static float* reserve(const Adapters& adapters, std::int64_t m) {
    return scratch(static_cast<std::size_t>(m * slices(adapters) * wide(adapters)), kShrunk);
  }

  bool is_any() const { return slots_ != nullptr; }

  // A thread's share of A · x.
  void shrink(int thread, int threads) const {
    const std::int64_t rows = wide(adapters_), all = slices(adapters_) * rows;
    for (std::int64_t i = all * thread / threads; i < all * (thread + 1) / threads; ++i) {
      for (std::int64_t token = 0; token < task_.m; ++token) {
        if (slots_[token] >= 0) shrunk(token, i / rows)[i % rows] = shrink(token, i / rows, i % rows);
      }
    }
  }

  // A thread's share of the sums with B · (A · x), once all have come.
  void expand(int thread, int threads) const {
    const std::int64_t all = task_.w.n() / kLanes;
    std::int64_t unit = all * thread / threads, before = 0;
    const std::int64_t end = all * (thread + 1) / threads;
    for (std::int64_t slice = 0; slice < slices(adapters_); ++slice) {
      const std::int64_t outputs = adapters_.slices[slice].outputs;
      for (; unit < end && unit * kLanes < before + outputs; ++unit) {
        for (std::int64_t token = 0; token < task_.m; ++token) {
          if (slots_[token] >= 0) expand(token, slice, unit * kLanes - before, unit * kLanes);
        }
      }
      before += outputs;
    }
  }

 private:
  static std::int64_t slices(const Adapters& adapters) {
    return static_cast<std::int64_t>(adapters.slices.size());
  }
  // Elements of A · x, with zeros up to a whole vector.
  static std::int64_t wide(const Adapters& adapters) {
    return (adapters.rank + kLanes - 1) / kLanes * kLanes;
  }
  float* shrunk(std::int64_t token, std::int64_t slice) const {
    return shrunk_ + (token * slices(adapters_) + slice) * wide(adapters_);
  }

  float shrink(std::int64_t token, std::int64_t slice, std::int64_t row) const {
    if (row >= adapters_.rank) return 0;
    const Places places = task_.places();
    const std::int64_t k = adapters_.k;
    const std::uint16_t* a =
        adapters_.slices[slice].a + (slots_[token] * adapters_.rank + row) * k;
    Floats left = zeros(), right = zeros();
    for (std::int64_t i = 0; i < k; i += 2 * kLanes) {
      const std::uint16_t* x = task_.x + places.at(token, i);
      left = times_plus(load_bf16(a + i), load_bf16(x), left);
      right = times_plus(load_bf16(a + i + kLanes), load_bf16(x + kLanes), right);
    }
    return as_float(as_bf16(sum_of(plus(left, right))));
  }

  // 16 outputs of a token, from one of the slice on, which is `at` of the layer.
  void expand(std::int64_t token, std::int64_t slice, std::int64_t output, std::int64_t at) const {
    const AdapterSlice& own = adapters_.slices[slice];
    const std::int64_t rank = adapters_.rank;
    const std::uint16_t* b = own.b + (slots_[token] * own.outputs + output) * rank;
    const float* x = shrunk(token, slice);
    float added[kLanes];
    for (int i = 0; i < kLanes; ++i, b += rank) {
      Floats sum = zeros();
      for (std::int64_t row = 0; row < rank; row += kLanes) {
        sum = times_plus(load_some(b + row, rank - row), load_floats(x + row), sum);
      }
      added[i] = sum_of(sum);
    }
    if (task_.partial != nullptr) {
      float* y = task_.partial + token * task_.w.n() + at;
      store_floats(y, plus(load_floats(y), load_floats(added)));
    } else {
      std::uint16_t* y = task_.y_of(token) + at;
      store_bf16(y, plus(load_bf16(y), rounded(load_floats(added))));
    }
  }

  const Adapters& adapters_;
  const Task& task_;
  const AdapterSlots slots_;
  float* shrunk_;  // [m][slices][wide]
};

// A linear layer's product for few tokens, with what their adapters add to it.
class Product {
 public:
  Product(const Linear& linear, const Task& task, AdapterSlots slots)
      : product_(task), addition_(linear.adapters, task, slots) {}

  // What the scratch memory gives must not move while products share it.
  static void reserve(const Linear& linear, std::int64_t m) {
    FewTokens::reserve(linear.w, m);
    Addition::reserve(linear.adapters, m);
  }

  // The first weights of this thread's share.
  ReadAhead ahead(int thread) const { return product_.ahead(thread); }

  // One thread's share of the work; all of the team's threads have to come, here and behind.  What
  // it gives is there once all have come again.
  void work(int thread, int threads) {
    if (addition_.is_any()) addition_.shrink(thread, threads);
    product_.work(thread);
  }
  void finish(int thread, int threads, Barrier& barrier, ReadAhead& ahead) const {
    if (!addition_.is_any()) return;
    barrier.wait(ahead);
    addition_.expand(thread, threads);
  }

 private:
  FewTokens product_;
  Addition addition_;
};

}  // namespace ray_hetero::RAY_HETERO_LEVEL

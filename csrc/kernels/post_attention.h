// What a decoder layer computes from one attention to the next, for a decode step:
//
//   r ← r + O·a      h ← D·(silu(G·n) ∘ (U·n))  with n = norm(r)      r ← r + h      q ← Q·norm(r)
//
// in one parallel region.  As operators of their own, what lies between the products costs a step
// little arithmetic and much waiting: for the threads to be called together, and for instructions
// that a layer's weights have driven out of the caches.
//
// Rounding is that of vLLM's operators: products, norms and sums of residuals are bf16, a norm is
// taken of the sum before it is rounded.  Of a tensor-parallel group O and D are the rank's parts,
// whose sums over all ranks are rounded once.
//
// Included once for each level, see levels.h.

namespace ray_hetero::RAY_HETERO_LEVEL {

// What a root-mean-square norm multiplies n values with, by the sums of their squares.
inline Floats scale_of(Floats squares, const Norm& norm, std::int64_t n) {
  const float mean = sum_of(squares) / static_cast<float>(n);
  return spread(1.0f / std::sqrt(mean + norm.epsilon));
}

inline void store_normed(std::uint16_t* at, Floats values, Floats scale,
                                         const std::uint16_t* weight) {
  store_bf16(at, times(rounded(times(values, scale)), load_bf16(weight)));
}

// x + residual, or x where there is no residual.
inline Floats added(const std::uint16_t* x, const std::uint16_t* residual,
                                    std::int64_t i) {
  const Floats value = load_bf16(x + i);
  return residual == nullptr ? value : plus(value, load_bf16(residual + i));
}

// sum ← x + residual, y ← norm(x + residual), of one token.  x, residual (or nullptr) and sum are
// [m][n], y is as `places` says; n is a multiple of 16.
inline void add_and_norm(std::int64_t token, const std::uint16_t* x,
                                         const std::uint16_t* residual, const Norm& norm,
                                         std::uint16_t* sum, std::uint16_t* y,
                                         const Places& places) {
  const std::int64_t n = places.stride;
  x += token * n;
  residual = residual == nullptr ? nullptr : residual + token * n;
  sum += token * n;
  Floats squares = zeros();
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const Floats both = added(x, residual, i);
    squares = times_plus(both, both, squares);
  }
  const Floats scale = scale_of(squares, norm, n);
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const Floats both = added(x, residual, i);
    store_bf16(sum + i, both);
    store_normed(y + places.at(token, i), both, scale, norm.weight + i);
  }
}

// silu(gate) ∘ up, 16 at a time.  For a negative gate e^-gate may be infinite: the quotient is then 0.
inline void gate(const std::uint16_t* gate, const std::uint16_t* up,
                                 std::uint16_t* y) {
  const Floats x = load_bf16(gate), one = spread(1.0f);
  const Floats power = power_of_two(times(x, spread(-kLog2E)));
  const Floats silu = over(x, plus(one, power));
  store_bf16(y, times(silu, load_bf16(up)));
}

// A thread's share of the tokens.
inline void add_and_norm_some(int thread, int threads, const std::uint16_t* x,
                              const std::uint16_t* residual, const Norm& norm, std::uint16_t* sum,
                              std::uint16_t* y, const Places& places) {
  for (std::int64_t token = thread; token < places.m; token += threads) {
    add_and_norm(token, x, residual, norm, sum, y, places);
  }
}

inline Task task_of(const Linear& linear, const std::uint16_t* from, const Places& places,
                    std::uint16_t* to, float* partial = nullptr) {
  return {from, linear.w, linear.bias, to, places.m, linear.w.k(), places.are_tiles, partial};
}

class PostAttentionBlock {
 public:
  // attended [m][output.w.k()] at `places`, residual [m][hidden] → sum [m][hidden],
  // y [m][outputs()], all bf16; sum may be the residual.  reserve() must have been called for all
  // that work at the same time.
  PostAttentionBlock(const PostAttention& layer, const std::uint16_t* attended, const Places& places,
                    const std::uint16_t* residual, std::uint16_t* sum, std::uint16_t* y)
      : layer_(layer), residual_(residual), normed_places_{places.m, layer.output.w.n(), kHasTiles},
        gated_places_{places.m, layer.down.w.k(), kHasTiles}, sum_(sum),
        projected_(scratch_bf16(elements(layer, places.m), kBetween)),
        normed_(projected_ + normed_places_.elements()),
        gate_up_(normed_ + normed_places_.elements()),
        gated_(gate_up_ + 2 * gated_places_.elements()),
        sum_between_(layer.next ? gated_ + gated_places_.elements() : sum), y_(y),
        output_task_(task_of(layer.output, attended, places, projected_, partial(kOutput))),
        up_task_(task_of(layer.gate_up, normed_, normed_places_, gate_up_)),
        down_task_(task_of(layer.down, gated_, gated_places_, layer.next ? projected_ : y,
                           partial(kDown))),
        output_(output_task_), up_(up_task_), down_(down_task_) {
    if (layer.next) {
      next_task_ = task_of(layer.next->qkv, normed_, normed_places_, y);
      next_.emplace(next_task_);
    }
  }
  PostAttentionBlock(const PostAttentionBlock&) = delete;  // its products refer to its tasks
  PostAttentionBlock& operator=(const PostAttentionBlock&) = delete;

  // What the scratch memory gives must not move while the products share it.
  static void reserve(const PostAttention& layer, std::int64_t m) {
    scratch_bf16(elements(layer, m), kBetween);
    for (const Linear* linear : {&layer.output, &layer.gate_up, &layer.down}) {
      FewTokens::reserve(linear->w, m);
    }
    if (layer.next) FewTokens::reserve(layer.next->qkv.w, m);
  }

  // A thread's own memory, which it has to have before it begins to work.
  void reserve_own() const {
    for (const Task* task : {&output_task_, &up_task_, &down_task_}) FewTokens::reserve_own(*task);
    if (next_) FewTokens::reserve_own(next_task_);
  }

  // A thread's share; all of the team's have to come.  False if a rank of the group is missing, as
  // RankSums knows then: nothing is to be computed any more.
  bool work(int thread, int threads, Barrier& barrier) {
    output_.work(thread);
    ReadAhead up = up_.ahead(thread);
    if (!project(thread, threads, barrier, up, kOutput, projected_)) return false;
    norm(thread, threads, residual_, layer_.norm, sum_between_);
    barrier.wait(up);
    up_.work(thread);
    ReadAhead down = down_.ahead(thread);
    barrier.wait(down);
    gates(thread, threads);
    barrier.wait(down);
    down_.work(thread);
    if (!next_) {
      ReadAhead nothing(nullptr, 0);
      return layer_.sums == nullptr || project(thread, threads, barrier, nothing, kDown, y_);
    }
    ReadAhead next = next_->ahead(thread);
    if (!project(thread, threads, barrier, next, kDown, projected_)) return false;
    norm(thread, threads, sum_between_, layer_.next->norm, sum_);
    barrier.wait(next);
    next_->work(thread);
    return true;
  }

  // The first weights of this thread's share.
  ReadAhead ahead(int thread) const { return output_.ahead(thread); }

 private:
  static std::int64_t elements(const PostAttention& layer, std::int64_t m) {
    return (3 * layer.output.w.n() + 3 * layer.down.w.k()) * m;
  }

  // Where the ranks of a group write what they project.
  enum Place { kOutput, kDown };
  float* partial(Place place) const {
    return layer_.sums == nullptr ? nullptr : layer_.sums->partial(place);
  }

  // Have what all threads have projected be in `to`, of all ranks; false if one is missing.
  bool project(int thread, int threads, Barrier& barrier, ReadAhead& ahead, Place place,
               std::uint16_t* to) const {
    if (layer_.sums != nullptr) {
      return sum_over_ranks(thread, threads, barrier, ahead, *layer_.sums, place,
                            normed_places_.elements(), to);
    }
    barrier.wait(ahead);
    return true;
  }

  void norm(int thread, int threads, const std::uint16_t* residual, const Norm& norm,
            std::uint16_t* sum) const {
    add_and_norm_some(thread, threads, projected_, residual, norm, sum, normed_, normed_places_);
  }

  void gates(int thread, int threads) const {
    const std::int64_t wide = gated_places_.stride, parts = wide / kLanes;
    const std::int64_t all = gated_places_.m * parts;
    for (std::int64_t i = all * thread / threads; i < all * (thread + 1) / threads; ++i) {
      const std::int64_t token = i / parts, at = i % parts * kLanes;
      const std::uint16_t* from = gate_up_ + token * 2 * wide + at;
      gate(from, from + wide, gated_ + gated_places_.at(token, at));
    }
  }

  const PostAttention& layer_;
  const std::uint16_t* residual_;
  const Places normed_places_, gated_places_;
  std::uint16_t* sum_;
  std::uint16_t *projected_, *normed_, *gate_up_, *gated_, *sum_between_, *y_;
  Task output_task_, up_task_, down_task_, next_task_{};
  FewTokens output_, up_, down_;
  std::optional<FewTokens> next_;
};

// More tokens than a decode step should have are computed in several parts.
inline void run(const PostAttention& layer, const std::uint16_t* attended,
                const std::uint16_t* residual, std::int64_t m, std::uint16_t* sum,
                std::uint16_t* y) {
  for (std::int64_t left = m; left > 0; left -= std::min(left, kFewTokens)) {
    const std::int64_t tokens = std::min(left, kFewTokens);
    PostAttentionBlock::reserve(layer, tokens);
    const Places places{tokens, layer.output.w.k(), false};
    PostAttentionBlock block(layer, attended, places, residual, sum, y);
    together([&] { block.reserve_own(); },
             [&](int thread, int threads, Barrier& barrier) {
               block.work(thread, threads, barrier);
             });
    if (layer.sums != nullptr) layer.sums->check();
    attended += tokens * layer.output.w.k();
    residual += tokens * layer.output.w.n();
    sum += tokens * layer.output.w.n();
    y += tokens * layer.outputs();
  }
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

// The routed experts of a mixture layer, in one call:
//
//   y = Σ w · (D·activation(G·x, U·x) + b)  over the experts that were chosen for a token.
//
// Included once for each level, see levels.h.
//
// Only the experts that some token chose are read, each once.  Their products are cut into units,
// parts of blocks of 32 outputs, which threads take from one queue whatever the expert, so that
// all of them stream weights until the last unit.  An expert's tokens are gathered in groups of 32.
// A block of the first product holds 16 outputs of the gate and their 16 of up; so the thread that
// has summed it applies the activation.
//
// Sums are taken in an order that depends neither on the number of threads nor on chance: parts of a
// block one after the other, then a token's experts as they were chosen.

namespace ray_hetero::RAY_HETERO_LEVEL {

// Tokens whose products are summed from a weight's rows as these lie in memory.
constexpr std::int64_t kDirectExpertTokens = kHasTiles ? kFewTokens : kGroup;

// ---- tokens of experts ---------------------------------------------------------------------------

// Vectors of bf16 of an expert's tokens: groups of 32, which lie one behind the other.
struct ExpertTokens {
  const std::uint16_t* data;
  std::int64_t count, k;

  std::int64_t groups() const { return (count + kFewTokens - 1) / kFewTokens; }
  std::int64_t tokens(std::int64_t group) const {
    return std::min(kFewTokens, count - group * kFewTokens);
  }
  const std::uint16_t* group(std::int64_t group) const { return data + group * kFewTokens * k; }
  Places places(std::int64_t group) const { return {tokens(group), k, kHasTiles}; }
};

// Of an element i, one of 16 neighbours, of an expert's token: where it is behind its first one's.
inline std::int64_t place_among(std::int64_t token, std::int64_t count, std::int64_t k,
                                std::int64_t i) {
  const std::int64_t group = token / kFewTokens;
  const Places places{std::min(kFewTokens, count - group * kFewTokens), k, kHasTiles};
  return group * kFewTokens * k + places.at(token % kFewTokens, i);
}

// ---- a product of all experts --------------------------------------------------------------------

// One of the two products of the experts that a step uses.
//
// Tokens(number) gives the ExpertTokens of an active expert, store(number, block, first, count,
// sums) takes sums [count][kBlock] of its tokens from `first` on.
template <typename Tokens, typename Store>
class ExpertProduct {
 public:
  ExpertProduct(const Experts& experts, Weight Expert::* which, const Routing& routing,
                const Tokens& tokens, const Store& store, Buffer shared)
      : experts_(experts), which_(which), routing_(routing), tokens_(tokens), store_(store),
        blocks_((experts.experts.front().*which).blocks()),
        pairs_((experts.experts.front().*which).pairs()),
        parts_(routing.most() > kFewTokens ? 1 : (pairs_ + kUnitRows - 1) / kUnitRows),
        rows_((pairs_ / kTile + parts_ - 1) / parts_ * kTile),
        threads_(omp_get_max_threads()),
        wide_(routing.most() <= kFewTokens
                  ? 1
                  : std::clamp<std::int64_t>(routing.active() * blocks_ / (8 * threads_), 1,
                                             kPieceBlocks)),
        columns_((blocks_ + wide_ - 1) / wide_),
        queue_(routing.active() * columns_ * parts_, threads_) {
    if (parts_ == 1) return;
    shared_ = scratch(routing.places() * blocks_ * parts_ * kBlock, shared);
    missing_.reset(new std::atomic<int>[routing.active() * blocks_]);
    for (std::int64_t block = 0; block < routing.active() * blocks_; ++block) {
      missing_[block].store(static_cast<int>(parts_), std::memory_order_relaxed);
    }
  }

  // The first weights of this thread's share.
  ReadAhead ahead(int thread) const {
    const Units units = queue_.first(thread);
    if (units.count == 0) return {nullptr, 0};
    const std::int64_t column = units.first / parts_, number = column / columns_;
    const std::int64_t block = column % columns_ * wide_, row = units.first % parts_ * rows_;
    const Stretch stretch = weight(number).stretch(block, row, 0);
    const std::int64_t left = (blocks_ - block) * pairs_ - row;
    const std::int64_t share = units.count * wide_ * rows_;
    return {stretch.data, std::min(left, share) / 2 * stretch.pair_bytes};
  }

  // A thread's own memory, which it has to have before it begins to work.
  void reserve_own() const {
    const std::int64_t few = 2 * std::min(routing_.most(), kFewTokens);
    const std::int64_t many = wide_ * std::min(routing_.most(), kPieceTokens);
    scratch(std::max(few, many) * kBlock, kOwnSums);
    scratch_bf16(kPieceRows * kRow, kExpanded);
    reserve_few(std::min(routing_.most(), kFewTokens));
  }

  // One thread's share of the work; all of the team's threads have to come.
  void work(int thread) {
    TileSetUp set_up;
    for (Units units; (units = queue_.next(thread, parts_)).count > 0;) {
      const std::int64_t column = units.first / parts_, number = column / columns_;
      const std::int64_t block = column % columns_ * wide_;
      if (units.count < parts_) {
        one_part(number, block, units.first % parts_, set_up);
      } else if (routing_.tokens(number) > kFewTokens) {
        many_tokens(number, block, std::min(block + wide_, blocks_), set_up);
      } else {
        for (std::int64_t one = block; one < std::min(block + wide_, blocks_); ++one) {
          whole_block(number, one, set_up);
        }
      }
    }
    if constexpr (kHasTiles) release_tiles();
  }

 private:
  const Weight& weight(std::int64_t number) const {
    return experts_.experts[routing_.expert(number)].*which_;
  }

  // All parts of a block of up to 32 tokens, whose sums stay with this thread.
  void whole_block(std::int64_t number, std::int64_t block, TileSetUp& set_up) const {
    const ExpertTokens x = tokens_(number);
    float* sums = scratch(2 * x.count * kBlock, kOwnSums);
    for (std::int64_t part = 0; part < parts_; ++part) {
      float* to = part == 0 ? sums : sums + x.count * kBlock;
      sum_part(number, x, block, part, set_up, to);
      if (part > 0) add(sums, to, x.count);
    }
    finish(number, x, block, sums);
  }

  // One part; who computes the last of a block puts them together.
  void one_part(std::int64_t number, std::int64_t block, std::int64_t part,
                TileSetUp& set_up) {
    const ExpertTokens x = tokens_(number);
    const std::int64_t floats = x.count * kBlock;
    float* parts = shared_ + (routing_.first(number) * blocks_ + block * x.count) * parts_ * kBlock;
    sum_part(number, x, block, part, set_up, parts + part * floats);
    std::atomic<int>& missing = missing_[number * blocks_ + block];
    if (missing.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    for (std::int64_t other = 1; other < parts_; ++other) {
      add(parts, parts + other * floats, x.count);
    }
    finish(number, x, block, parts);
  }

  void sum_part(std::int64_t number, const ExpertTokens& x, std::int64_t block, std::int64_t part,
                TileSetUp& set_up, float* sums) const {
    const std::int64_t row = part * rows_, rows = std::min(rows_, pairs_ - row);
    const Weight& w = weight(number);
    set_up.for_tokens(x.count);
    const Stretch stretch = w.stretch(block, row, rows);
    if (x.count > kDirectExpertTokens && !kernels_of(stretch).has_codes) {
      for (std::int64_t at = row; at < row + rows; at += kPieceRows) {
        // `finish` adds the outliers.
        add_piece(w, block, at, std::min(kPieceRows, row + rows - at), at == row, {}, x, 0, x.count,
                  set_up, sums);
      }
      return;
    }
    sum_few(x.places(0).tiles(x.data, row), x.count, stretch, sums);
  }

  // Neighbouring blocks of many tokens, some of these after the other: a piece of the tokens stays
  // in the second-level cache while a piece of each block is multiplied with it.
  void many_tokens(std::int64_t number, std::int64_t first, std::int64_t last,
                   TileSetUp& set_up) const {
    const ExpertTokens x = tokens_(number);
    const Weight& w = weight(number);
    for (std::int64_t begin = 0; begin < x.count; begin += kPieceTokens) {
      const std::int64_t tokens = std::min(kPieceTokens, x.count - begin);
      float* sums = scratch((last - first) * tokens * kBlock, kOwnSums);
      for (std::int64_t row = 0; row < pairs_; row += kPieceRows) {
        const std::int64_t rows = std::min(kPieceRows, pairs_ - row);
        for (std::int64_t block = first; block < last; ++block) {
          add_piece(w, block, row, rows, row == 0, w.encoding->outliers(block), x, begin, tokens,
                    set_up, sums + (block - first) * tokens * kBlock);
        }
      }
      for (std::int64_t block = first; block < last; ++block) {
        float* of_block = sums + (block - first) * tokens * kBlock;
        store_(number, block, begin, tokens, of_block);
      }
    }
  }

  // What some rows of a block add to sums of tokens from `begin` on, the first of a group.
  void add_piece(const Weight& w, std::int64_t block, std::int64_t row, std::int64_t rows,
                 bool is_first, const Outliers& outliers, const ExpertTokens& x, std::int64_t begin,
                 std::int64_t tokens, TileSetUp& set_up, float* sums) const {
    const Stretch stretch = w.stretch(block, row, rows);
    std::uint16_t* room = scratch_bf16(kPieceRows * kRow, kExpanded);
    const std::uint16_t* in_bf16 = expanded(stretch, outliers, room);
    if constexpr (kHasTiles) {
      // The same block's next rows; they are read while this piece is multiplied.
      const std::uint8_t* next = stretch.data + rows / 2 * stretch.pair_bytes;
      const std::int64_t groups = (tokens + kFewTokens - 1) / kFewTokens;
      const std::int64_t tile_lines = kTile / 2 * stretch.pair_bytes / kLineBytes;
      const std::int64_t lines = (tile_lines + groups - 1) / groups;
      for (std::int64_t token = 0; token < tokens; token += kFewTokens) {
        const std::int64_t group = (begin + token) / kFewTokens, here = x.tokens(group);
        const std::int64_t step = here * 2 * kTile;
        set_up.for_tokens(here);
        (here > kTile ? add_group<true> : add_group<false>)(
            x.group(group) + row / kTile * step, step, in_bf16, rows, is_first, next, lines,
            sums + token * kBlock);
        next += rows / kTile * lines * kLineBytes;
      }
    } else {
      for (std::int64_t token = 0; token < tokens; token += kGroup) {
        const auto some = std::min<std::int64_t>(kGroup, tokens - token);
        kAddRows[some - 1](x.data + (begin + token) * x.k + 2 * row, x.k, in_bf16, rows, is_first,
                           sums + token * kBlock);
      }
    }
  }

  void add(float* sums, const float* more, std::int64_t tokens) const {
    for (std::int64_t at = 0; at < tokens * kBlock; at += kLanes) {
      store_floats(sums + at, plus(load_floats(sums + at), load_floats(more + at)));
    }
  }

  void finish(std::int64_t number, const ExpertTokens& x, std::int64_t block, float* sums) const {
    const Weight& w = weight(number);
    for (std::int64_t token = 0; token < x.count; token += kFewTokens) {
      const std::int64_t group = token / kFewTokens;
      const Places places = x.places(group);
      const Task task{x.group(group), w, nullptr, nullptr, places.m, places.stride, kHasTiles};
      add_outliers(task, block, 0, places.m, sums + token * kBlock);
    }
    store_(number, block, 0, x.count, sums);
  }

  const Experts& experts_;
  Weight Expert::* const which_;
  const Routing& routing_;
  const Tokens tokens_;
  const Store store_;
  const std::int64_t blocks_, pairs_;  // of an expert's weight
  const std::int64_t parts_, rows_;    // units of a block, and rows of each
  const int threads_;
  const std::int64_t wide_, columns_;  // blocks of a unit of many tokens, and such of an expert
  WorkQueue queue_;
  float* shared_ = nullptr;                      // sums of parts: [places][blocks][parts][kBlock]
  std::unique_ptr<std::atomic<int>[]> missing_;  // parts of each block that are not done
};

// ---- a layer ------------------------------------------------------------------------------------

// gate · sigmoid(alpha · gate) · (up + beta), 16 at a time.  For a negative gate the power may be
// infinite: the quotient is then 0.
RAY_HETERO_INLINE Floats activated(const Activation& activation, Floats gate, Floats up) {
  if (activation.limit < std::numeric_limits<float>::infinity()) {
    const Floats none = zeros(), least = spread(-activation.limit);
    gate = minus(none, larger_of_first(least, minus(none, gate), kLanes));
    up = minus(none, larger_of_first(least, minus(none, up), kLanes));
    up = larger_of_first(least, up, kLanes);
  }
  const Floats power = power_of_two(times(gate, spread(-kLog2E * activation.alpha)));
  return times(over(gate, plus(spread(1.0f), power)), plus(up, spread(activation.beta)));
}

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
      const Experts& experts = layer->experts_;
      const std::int64_t inner = layer->inner_, tokens = layer->routing_.tokens(number);
      const float* bias = experts.gate_up_bias;
      if (bias != nullptr) {
        bias += layer->routing_.expert(number) * 2 * inner + block * kBlock;
      }
      std::uint16_t* to = layer->activated_ + layer->routing_.first(number) * inner;
      for (std::int64_t token = first; token < first + count; ++token, sums += kBlock) {
        Floats gate = load_floats(sums), up = load_floats(sums + kLanes);
        if (bias != nullptr) {
          gate = plus(gate, load_floats(bias));
          up = plus(up, load_floats(bias + kLanes));
        }
        store_bf16(to + place_among(token, tokens, inner, block * kLanes),
                   activated(experts.activation, gate, up));
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

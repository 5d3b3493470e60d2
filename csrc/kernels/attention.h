// Attention of a decode step: one token of each request over its KV blocks, in vLLM's layouts.
//
// Requests are cut into parts, at most 64 of each; a unit is a part and a head of keys, with the
// heads of queries that share it, of all requests that do (attention_parts.h).  Threads take units
// as in few_tokens.h, and who computes the last part of a head puts its parts together, in their order:
// the result depends neither on the number of threads nor on chance.  The softmax of parts is that of Dao et al.,
// "Flash-Decoding for long-context inference", 2023.
//
// Included once for each level, see levels.h.

namespace ray_hetero::RAY_HETERO_LEVEL {

// A layer's: `qkv` [m][queries, keys, values] → `attended` [m][queries], both bf16; the latter
// is as `places` says.
class Attention {
 public:
  Attention(const Rotation& rotation, const Scores& scores, const Cache& cache,
            const Requests& requests, const Parts& parts, std::uint16_t* qkv,
            std::uint16_t* attended, const Places& places)
      : rotation_(rotation), scores_(scores), cache_(cache), requests_(requests),
        parts_(parts), each_(rotation.heads / rotation.kv_heads),
        qkv_(qkv), attended_(attended), places_(places),
        queue_(parts.units(), omp_get_max_threads()),
        missing_(new std::atomic<int>[parts.groups() * rotation.kv_heads]),
        partial_(scratch(partial(rotation, parts), kPartial)) {
    for (std::int64_t i = 0; i < parts.groups() * rotation.kv_heads; ++i) {
      const std::int64_t parts_of = parts.of(i / rotation.kv_heads);
      missing_[i].store(static_cast<int>(parts_of), std::memory_order_relaxed);
    }
  }

  // Floats of what parts keep until they are put together, and of queries that are gathered.
  static std::size_t partial(const Rotation& rotation, const Parts& parts) {
    const std::int64_t heads = rotation.heads / rotation.kv_heads * parts.all_rows();
    const std::int64_t gathered = parts.has_shared() ? rotation.size / 2 : 0;
    return static_cast<std::size_t>(heads * (rotation.size + 2 + gathered));
  }

  // Rotate, and write keys and values: a thread's share of heads.  All must have come before work().
  void write(int thread, int threads) const {
    const std::int64_t all = requests_.m * rotation_.kv_heads;
    for (std::int64_t i = all * thread / threads; i < all * (thread + 1) / threads; ++i) {
      write_head(i / rotation_.kv_heads, i % rotation_.kv_heads);
    }
  }

  void work(int thread) {
    for (Units units; (units = queue_.next(thread)).count > 0;) attend(units.first);
  }

 private:
  std::int64_t stride() const { return (rotation_.heads + 2 * rotation_.kv_heads) * rotation_.size; }

  void write_head(std::int64_t token, std::int64_t head) const {
    const std::int64_t size = rotation_.size;
    std::uint16_t* queries = qkv_ + token * stride();
    std::uint16_t* key = queries + (rotation_.heads + head) * size;
    const std::int64_t position = requests_.positions[token];
    turn_heads(rotation_, queries + head * each_ * size, each_, rotation_.query_norm, position);
    turn_heads(rotation_, key, 1, rotation_.key_norm, position);
    const std::int64_t slot = requests_.slots[token];
    if (slot < 0) return;
    const std::int64_t block = requests_.block, at = slot % block;
    std::uint16_t* keys = keys_of(slot / block, head);
    std::uint16_t* values = keys + block * size;
    const std::uint16_t* value = key + rotation_.kv_heads * size;
    if (requests_.layout == Layout::kRows) {
      for (std::int64_t i = 0; i < size; ++i) keys[i * block + at] = key[i];
      std::memcpy(values + at * size, value, size * sizeof(std::uint16_t));
      return;
    }
    keys += at / kTile * kTile * size + at % kTile * 2;
    for (std::int64_t i = 0; i < size; i += 2) {
      std::memcpy(keys + i * kTile, key + i, 2 * sizeof(std::uint16_t));
    }
    values += at / 2 * 2 * kTile + at % 2;
    for (std::int64_t i = 0; i < size; ++i) {
      values[i / kTile * kTile * block + i % kTile * 2] = value[i];
    }
  }

  std::uint16_t* keys_of(std::int64_t block, std::int64_t head) const {
    return cache_.data + block * cache_.block_stride + head * cache_.head_stride;
  }

  const std::uint16_t* keys_of_token(std::int64_t group, std::int64_t head,
                                     std::int64_t token) const {
    // The last request has all blocks.
    const std::int64_t last = parts_.request(group) + parts_.rows(group) - 1;
    return keys_of(requests_.blocks[last * requests_.most_blocks + token / requests_.block], head);
  }

  // What a unit keeps of each of its heads until the parts are put together.
  struct Kept {
    float* sums;     // [heads][size]
    float* largest;  // [heads], of scores
    float* shares;   // [heads], their sum
  };

  Kept kept(std::int64_t unit) const {
    const std::int64_t size = rotation_.size, heads = parts_.rows(parts_.group(unit)) * each_;
    float* sums = partial_ + parts_.rows_before(unit) * each_ * (size + 2);
    return {sums, sums + heads * size, sums + heads * (size + 1)};
  }

  void attend(std::int64_t unit) {
    const std::int64_t group = parts_.group(unit), head = parts_.head(unit);
    const std::int64_t heads = parts_.rows(group) * each_;
    const std::int64_t end = std::min(parts_.end(unit), parts_.length(group));
    const std::uint16_t* q = queries(unit);
    const Kept to = kept(unit);
    std::memset(to.sums, 0, heads * rotation_.size * sizeof(float));
    std::fill_n(to.largest, heads, -std::numeric_limits<float>::infinity());
    std::fill_n(to.shares, heads, 0.0f);
    for (std::int64_t token = parts_.begin(unit); token < end; token += kChunk) {
      const Span span{group, head, token, std::min(kChunk, end - token)};
      for (std::int64_t query = 0; query < heads; query += kGroup) {
        attend(span, q, query, std::min<std::int64_t>(kGroup, heads - query), to);
      }
    }
    std::atomic<int>& missing = missing_[group * rotation_.kv_heads + head];
    if (missing.fetch_sub(1, std::memory_order_acq_rel) == 1) finish(group, head);
  }

  // Queries of a unit, [heads][size]: those of several requests are brought together.
  const std::uint16_t* queries(std::int64_t unit) const {
    const std::int64_t group = parts_.group(unit), some = each_ * rotation_.size;
    const std::uint16_t* from =
        qkv_ + parts_.request(group) * stride() + parts_.head(unit) * some;
    if (parts_.rows(group) == 1) return from;
    float* behind = partial_ + parts_.all_rows() * each_ * (rotation_.size + 2);
    std::uint16_t* gathered =
        reinterpret_cast<std::uint16_t*>(behind) + parts_.rows_before(unit) * some;
    for (std::int64_t row = 0; row < parts_.rows(group); ++row) {
      std::memcpy(gathered + row * some, from + row * stride(), some * sizeof(std::uint16_t));
    }
    return gathered;
  }

  const HeadKernels& kernels() const {
    return kHeadKernels[static_cast<std::size_t>(requests_.layout)];
  }

  // Neighbouring tokens of a group's requests, and a head of keys.
  struct Span {
    std::int64_t group, head, begin, tokens;
  };

  // Some of the heads that share one of keys, to what is kept of all.
  void attend(const Span& span, const std::uint16_t* q, std::int64_t query, std::int64_t heads,
              const Kept& to) const {
    const std::int64_t size = rotation_.size, of_group = parts_.request(span.group);
    float scores[kGroup * kChunk];
    score(span, q + query * size, heads, query == 0, scores);
    for (std::int64_t head = 0; head < heads; ++head) {
      const std::int64_t all = query + head, request = of_group + all / each_;
      const std::int64_t tokens =
          std::min(span.tokens, requests_.lengths[request] - span.begin);
      float* own = scores + head * kChunk;
      if (tokens > 0) {
        float& largest = to.largest[all];
        const float before = largest;
        const std::int64_t hidden = parts_.seen(requests_.lengths[request]) - span.begin;
        const float more = soften(own, hidden, tokens, span.tokens, largest);
        const float kept = std::exp2(before - largest);
        to.shares[all] = to.shares[all] * kept + more;
        if (kept != 1) scale(to.sums + all * size, kept);
      } else {
        std::fill_n(own, kChunk, 0.0f);
      }
    }
    add_values(span, heads, scores, to.sums + query * size);
  }

  void score(const Span& span, const std::uint16_t* q, std::int64_t heads, bool is_first,
             float* scores) const {
    const std::int64_t size = rotation_.size, block = requests_.block;
    const bool tiles = requests_.layout == Layout::kTiles;
    for (std::int64_t token = 0; token < span.tokens; token += kSpan) {
      const std::int64_t place = span.begin + token, at = place % block;
      const std::uint16_t* keys = keys_of_token(span.group, span.head, place);
      if (is_first) prefetch(keys, at);
      kernels().score[heads - 1](q, size, keys + (tiles ? at * size : at), block,
                                   scores + token);
    }
  }

  void add_values(const Span& span, std::int64_t heads, const float* shares, float* sums) const {
    const std::int64_t size = rotation_.size, block = requests_.block;
    const bool tiles = requests_.layout == Layout::kTiles;
    for (std::int64_t token = 0; token < span.tokens; token += kSpan) {
      const std::int64_t place = span.begin + token, at = place % block;
      const std::uint16_t* values =
          keys_of_token(span.group, span.head, place) + block * size;
      for (std::int64_t i = 0; i < size; i += kSpan) {
        kernels().add_values[heads - 1](shares + token,
                                         values + (tiles ? i * block + at * kTile : at * size + i),
                                         block, std::min(kSpan, span.tokens - token), size,
                                         sums + i);
      }
    }
  }

  void scale(float* sums, float by) const {
    for (std::int64_t i = 0; i < rotation_.size; i += kTile) {
      store_floats(sums + i, times(load_floats(sums + i), spread(by)));
    }
  }

  // The values of 32 tokens of a block, and where tiles are, the keys of the next.
  void prefetch(const std::uint16_t* keys, std::int64_t at) const {
    const std::int64_t size = rotation_.size, block = requests_.block;
    const std::uint16_t* values = keys + block * size;
    if (requests_.layout == Layout::kRows) {
      prefetch_elements<prefetch_l2>(values + at * size, kSpan * size);
      return;
    }
    prefetch_elements<prefetch_l1>(keys + (at + kSpan) * size, kSpan * size);
    for (std::int64_t i = 0; i < size; i += kTile) {
      prefetch_elements<prefetch_l2>(values + i * block + at * kTile, kSpan * kTile);
    }
  }

  template <void (*kPrefetch)(const void*)>
  static void prefetch_elements(const std::uint16_t* at, std::int64_t elements) {
    constexpr std::int64_t kLine = kLineBytes / sizeof(std::uint16_t);
    for (std::int64_t i = 0; i < elements; i += kLine) kPrefetch(at + i);
  }

  // Scores that leave nothing to tokens before the window; finite, so that no NaN comes of them.
  static Floats without_first(Floats scores, std::int64_t hidden) {
    constexpr float kHidden = -1e30f;
    float all[kLanes];
    store_floats(all, scores);
    std::fill_n(all, std::min<std::int64_t>(hidden, kLanes), kHidden);
    return load_floats(all);
  }

  // Scores of the first tokens, of which some may be hidden, become 2^(score − largest), those of the
  // others up to the last 32 of `all` become 0.  `largest` is that of tokens before, and grows;
  // returns the sum.
  float soften(float* scores, std::int64_t hidden, std::int64_t tokens, std::int64_t all_tokens,
               float& largest) const {
    const Floats scale = spread(scores_.scale * kLog2E);
    Floats most = spread(largest);
    for (std::int64_t token = 0; token < tokens; token += kTile) {
      Floats scaled = times(load_floats(scores + token), scale);
      if (scores_.soft_cap > 0) scaled = capped(scaled);
      if (token < hidden) scaled = without_first(scaled, hidden - token);
      store_floats(scores + token, scaled);
      most = larger_of_first(most, scaled, tokens - token);
    }
    largest = largest_of(most);
    const Floats from = spread(largest);
    Floats all = zeros();
    for (std::int64_t token = 0; token < (all_tokens + kSpan - 1) / kSpan * kSpan;
         token += kTile) {
      const Floats power = power_of_two(minus(load_floats(scores + token), from));
      const Floats share = first(power, tokens - token);
      store_floats(scores + token, share);
      all = plus(all, share);
    }
    return sum_of(all);
  }

  // cap · tanh(score / cap) of scores that are exponents of 2: tanh(u) is 1 − 2 / (1 + e^2u).
  Floats capped(Floats scaled) const {
    const Floats one = spread(1.0f), cap = spread(scores_.soft_cap * kLog2E);
    const Floats power = power_of_two(times(scaled, spread(2 / scores_.soft_cap)));
    return times(cap, minus(one, over(spread(2.0f), plus(one, power))));
  }

  // Put the parts of a head together.
  void finish(std::int64_t group, std::int64_t head) const {
    const std::int64_t size = rotation_.size, parts = parts_.of(group);
    const auto of_part = [&](std::int64_t part) { return kept(parts_.unit(group, head, part)); };
    for (std::int64_t query = 0; query < parts_.rows(group) * each_; ++query) {
      float largest = of_part(0).largest[query], sum = 0;
      for (std::int64_t part = 1; part < parts; ++part) {
        largest = std::max(largest, of_part(part).largest[query]);
      }
      if (scores_.sinks != nullptr) {
        const float sink = scores_.sinks[head * each_ + query % each_] * kLog2E;
        largest = std::max(largest, sink);
        sum = std::exp2(sink - largest);
      }
      float* whole = of_part(0).sums + query * size;
      for (std::int64_t part = 0; part < parts; ++part) {
        const Kept from = of_part(part);
        const float weight = std::exp2(from.largest[query] - largest);
        sum += weight * from.shares[query];
        for (std::int64_t i = 0; i < size; i += kTile) {
          const Floats scaled = times(load_floats(from.sums + query * size + i), spread(weight));
          store_floats(whole + i, part == 0 ? scaled
                                                : plus(load_floats(whole + i), scaled));
        }
      }
      const Floats share = spread(1.0f / sum);
      const std::int64_t request = parts_.request(group) + query / each_;
      const std::int64_t first = (head * each_ + query % each_) * size;
      for (std::int64_t i = 0; i < size; i += kTile) {
        store_bf16(attended_ + places_.at(request, first + i),
                   times(load_floats(whole + i), share));
      }
    }
  }

  const Rotation& rotation_;
  const Scores& scores_;
  const Cache cache_;
  const Requests& requests_;
  const Parts& parts_;
  const std::int64_t each_;  // heads of queries for one of keys
  std::uint16_t* qkv_;
  std::uint16_t* attended_;
  const Places places_;
  WorkQueue queue_;
  std::unique_ptr<std::atomic<int>[]> missing_;  // parts of each head that are not done
  float* partial_;                               // kept of each unit, then gathered queries
};

}  // namespace ray_hetero::RAY_HETERO_LEVEL

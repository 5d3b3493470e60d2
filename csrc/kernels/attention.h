// Attention of a decode step: one token of each request over its KV blocks, in vLLM's layouts.
//
// Requests are cut into parts, at most 64 of them; a unit is a part and a head of keys, with the
// heads of queries that share it.  Threads take units as in linear.h, and who computes
// the last part of a head puts its parts together, in their order: the result depends neither on
// the number of threads nor on chance.  The softmax of parts is that of Dao et al.,
// "Flash-Decoding for long-context inference", 2023.
//
// Included once for each level, see levels.h.

namespace ray_hetero::RAY_HETERO_LEVEL {

// sums += values · by(head) for each head, in float.
template <int kHeads, typename By>
RAY_HETERO_INLINE void add_scaled(const std::uint16_t* values, By by,
                                                  Sums<kHeads>& sums) {
  const Floats left = load_bf16(values), right = load_bf16(values + kTile);
  for (int head = 0; head < kHeads; ++head) {
    const Floats one = spread(by(head));
    sums.left[head] = times_plus(left, one, sums.left[head]);
    sums.right[head] = times_plus(right, one, sums.right[head]);
  }
}

// Scores of 32 tokens: [kHeads][kChunk] = q [kHeads][size] · keys.
template <int kHeads>
void score_tiles(const std::uint16_t* q, std::int64_t size,
                                 const std::uint16_t* keys, std::int64_t, float* scores) {
  Sums<kHeads> sums;
  sums.clear();
  const std::uint16_t* next = keys + kTile * size;
  for (std::int64_t at = 0; at < size; at += 2, keys += 2 * kTile, next += 2 * kTile) {
    add_row(q + at, size, load_pairs(keys), load_pairs(next), sums);
  }
  sums.store(scores, kChunk);
}

template <int kHeads>
void score_rows(const std::uint16_t* q, std::int64_t size,
                                const std::uint16_t* keys, std::int64_t block, float* scores) {
  Sums<kHeads> sums;
  sums.clear();
  for (std::int64_t at = 0; at < size; ++at, keys += block) {
    add_scaled(keys, [&](int head) { return as_float(q[head * size + at]); }, sums);
  }
  sums.store(scores, kChunk);
}

// Sums of 32 elements of values: [kHeads][stride] += shares of up to 32 tokens · values.  What lies
// behind these tokens is somebody else's, or nobody's: it may be NaN, and must not be multiplied,
// not even with 0.
template <int kHeads>
void add_tiles_of_values(const float* shares, const std::uint16_t* values, std::int64_t block,
                         std::int64_t tokens, std::int64_t stride, float* to) {
  // As vLLM's kernel multiplies them, in bf16.
  std::uint16_t rounded_shares[kHeads][kSpan];
  for (int head = 0; head < kHeads; ++head) {
    store_bf16(rounded_shares[head], load_floats(shares + head * kChunk));
    store_bf16(rounded_shares[head] + kTile, load_floats(shares + head * kChunk + kTile));
  }
  Sums<kHeads> sums;
  sums.load(to, stride);
  const std::uint16_t* next = values + kTile * block;
  std::int64_t at = 0;
  for (; at + 2 <= tokens; at += 2, values += 2 * kTile, next += 2 * kTile) {
    add_row(rounded_shares[0] + at, kSpan, load_pairs(values), load_pairs(next), sums);
  }
  if (at < tokens) {
    add_row(rounded_shares[0] + at, kSpan, without_seconds(load_pairs(values)),
            without_seconds(load_pairs(next)), sums);
  }
  sums.store(to, stride);
}

template <int kHeads>
void add_rows_of_values(const float* shares, const std::uint16_t* values, std::int64_t,
                        std::int64_t tokens, std::int64_t stride, float* to) {
  Sums<kHeads> sums;
  sums.load(to, stride);
  for (std::int64_t at = 0; at < tokens; ++at, values += stride) {
    add_scaled(values, [&](int head) { return shares[head * kChunk + at]; }, sums);
  }
  sums.store(to, stride);
}

using Score = void (*)(const std::uint16_t*, std::int64_t, const std::uint16_t*, std::int64_t,
                       float*);
using AddValues = void (*)(const float*, const std::uint16_t*, std::int64_t, std::int64_t,
                           std::int64_t, float*);

// What a layout is computed with, for one head of queries and more.
struct HeadKernels {
  Score score[kGroup];
  AddValues add_values[kGroup];
};

template <int... kLess>
constexpr std::array<HeadKernels, 2> head_kernels(std::integer_sequence<int, kLess...>) {
  return {{{{score_tiles<kLess + 1>...}, {add_tiles_of_values<kLess + 1>...}},
           {{score_rows<kLess + 1>...}, {add_rows_of_values<kLess + 1>...}}}};
}
constexpr std::array<HeadKernels, 2> kHeadKernels =
    head_kernels(std::make_integer_sequence<int, kGroup>());

// A layer's: `qkv` [m][queries, keys, values] → `attended` [m][queries], both bf16; the latter
// is as `places` says.
class Attention {
 public:
  Attention(const Rotation& rotation, const Scores& scores, const Cache& cache,
            const Requests& requests, const Parts& parts, std::uint16_t* qkv,
            std::uint16_t* attended, const Places& places)
      : rotation_(rotation), scores_(scores), cache_(cache), requests_(requests),
        parts_(parts), each_(rotation.heads / rotation.kv_heads),
        kept_(each_ * (rotation.size + 2)), qkv_(qkv), attended_(attended),
        places_(places),
        queue_(parts.units(), omp_get_max_threads()),
        missing_(new std::atomic<int>[requests.m * rotation.kv_heads]),
        partial_(scratch(partial(rotation, parts), kPartial)) {
    for (std::int64_t i = 0; i < requests.m * rotation.kv_heads; ++i) {
      const std::int64_t parts_of = parts.of(i / rotation.kv_heads);
      missing_[i].store(static_cast<int>(parts_of), std::memory_order_relaxed);
    }
  }

  // Floats of what parts keep until they are put together.
  static std::size_t partial(const Rotation& rotation, const Parts& parts) {
    const std::int64_t each = rotation.heads / rotation.kv_heads;
    return static_cast<std::size_t>(parts.units() * each * (rotation.size + 2));
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

  const std::uint16_t* keys_of_token(std::int64_t request, std::int64_t head,
                                     std::int64_t token) const {
    return keys_of(requests_.blocks[request * requests_.most_blocks + token / requests_.block],
                   head);
  }

  void attend(std::int64_t unit) {
    const std::int64_t request = parts_.request(unit), head = parts_.head(unit);
    for (std::int64_t query = 0; query < each_; query += kGroup) {
      attend(unit, query, std::min<std::int64_t>(kGroup, each_ - query));
    }
    std::atomic<int>& missing = missing_[request * rotation_.kv_heads + head];
    if (missing.fetch_sub(1, std::memory_order_acq_rel) == 1) finish(request, head);
  }

  const HeadKernels& kernels() const {
    return kHeadKernels[static_cast<std::size_t>(requests_.layout)];
  }

  // Some of the heads that share one of keys.
  void attend(std::int64_t unit, std::int64_t query, std::int64_t heads) {
    const std::int64_t request = parts_.request(unit), size = rotation_.size;
    const std::int64_t end = std::min<std::int64_t>(parts_.end(unit), requests_.lengths[request]);
    float* sums = partial_ + unit * kept_ + query * size;
    float* largest = partial_ + unit * kept_ + each_ * size + query;
    float* shares = largest + each_;
    std::memset(sums, 0, heads * size * sizeof(float));
    std::fill_n(largest, heads, -std::numeric_limits<float>::infinity());
    std::fill_n(shares, heads, 0.0f);
    for (std::int64_t token = parts_.begin(unit); token < end; token += kChunk) {
      const Span span{request, parts_.head(unit), token, std::min(kChunk, end - token)};
      float scores[kGroup * kChunk];
      score(span, query, heads, scores);
      const std::int64_t hidden = parts_.seen(request) - token;
      for (std::int64_t head = 0; head < heads; ++head) {
        const float before = largest[head];
        const float more = soften(scores + head * kChunk, hidden, span.tokens, largest[head]);
        const float kept = std::exp2(before - largest[head]);
        shares[head] = shares[head] * kept + more;
        if (kept != 1) scale(sums + head * size, kept);
      }
      add_values(span, heads, scores, sums);
    }
  }

  // Neighbouring tokens of a request, and a head of keys.
  struct Span {
    std::int64_t request, head, begin, tokens;
  };

  void score(const Span& span, std::int64_t query, std::int64_t heads, float* scores) const {
    const std::int64_t size = rotation_.size, block = requests_.block;
    const bool tiles = requests_.layout == Layout::kTiles;
    const std::uint16_t* q =
        qkv_ + span.request * stride() + (span.head * each_ + query) * size;
    for (std::int64_t token = 0; token < span.tokens; token += kSpan) {
      const std::int64_t place = span.begin + token, at = place % block;
      const std::uint16_t* keys = keys_of_token(span.request, span.head, place);
      prefetch(keys, at);
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
          keys_of_token(span.request, span.head, place) + block * size;
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

  // Scores of some tokens, of which the first may be hidden, become 2^(score − largest), those of the others of the last 32 become 0.
  // `largest` is that of tokens before, and grows; returns the sum.
  float soften(float* scores, std::int64_t hidden, std::int64_t tokens, float& largest) const {
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
    for (std::int64_t token = 0; token < (tokens + kSpan - 1) / kSpan * kSpan; token += kTile) {
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
  void finish(std::int64_t request, std::int64_t head) const {
    const std::int64_t size = rotation_.size, parts = parts_.of(request);
    const auto kept = [&](std::int64_t part) {
      return partial_ + parts_.unit(request, head, part) * kept_;
    };
    for (std::int64_t query = 0; query < each_; ++query) {
      const std::int64_t largest_at = each_ * size + query, sum_at = largest_at + each_;
      float largest = kept(0)[largest_at], sum = 0;
      for (std::int64_t part = 1; part < parts; ++part) {
        largest = std::max(largest, kept(part)[largest_at]);
      }
      if (scores_.sinks != nullptr) {
        const float sink = scores_.sinks[head * each_ + query] * kLog2E;
        largest = std::max(largest, sink);
        sum = std::exp2(sink - largest);
      }
      float* whole = kept(0) + query * size;
      for (std::int64_t part = 0; part < parts; ++part) {
        const float* from = kept(part);
        const float weight = std::exp2(from[largest_at] - largest);
        sum += weight * from[sum_at];
        for (std::int64_t i = 0; i < size; i += kTile) {
          const Floats scaled = times(load_floats(from + query * size + i),
                                              spread(weight));
          store_floats(whole + i, part == 0 ? scaled
                                                : plus(load_floats(whole + i), scaled));
        }
      }
      const Floats share = spread(1.0f / sum);
      const std::int64_t first = (head * each_ + query) * size;
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
  const std::int64_t kept_;  // floats of a unit: sums of heads, their largest scores, their shares
  std::uint16_t* qkv_;
  std::uint16_t* attended_;
  const Places places_;
  WorkQueue queue_;
  std::unique_ptr<std::atomic<int>[]> missing_;  // parts of each head that are not done
  float* partial_;                               // [units][kept_]
};

}  // namespace ray_hetero::RAY_HETERO_LEVEL

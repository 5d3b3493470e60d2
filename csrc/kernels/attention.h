// Attention of a decode step: one token of each request over its KV blocks, in vLLM's layouts.
//
// Requests are cut into parts, at most 64 of each; a unit is a part and a head of keys, with the
// heads of queries that share it, of all requests that do (attention_parts.h).  Threads take units
// as in few_tokens.h, and who computes the last part of a head puts its parts together, in their order:
// the result depends neither on the number of threads nor on chance.  The softmax of parts is that
// of Dao et al., "Flash-Decoding for long-context inference", 2023.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "attention_heads.h"
#include "attention_parts.h"
#include "layers.h"
#include "rotation.h"
#include "scratch.h"
#include "team.h"
#include "work_queue.h"

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

  // A thread's own memory, which it has to have before it begins to work.
  static void reserve_own(const Rotation& rotation) { Own{rotation}; }

  // Whether all threads must have written before work(), as a request reads what another one
  // writes.  Else work() writes too: who attends to a new key has its lines in a cache that is near.
  bool writes_first() const { return !parts_.are_apart(); }

  // Rotate, and write keys and values: a thread's share of heads.
  void write(int thread, int threads) const {
    const std::int64_t all = requests_.m * rotation_.kv_heads;
    for (std::int64_t i = all * thread / threads; i < all * (thread + 1) / threads; ++i) {
      const std::int64_t token = i / rotation_.kv_heads, head = i % rotation_.kv_heads;
      turn_queries(token, queries_of(token, head));
      write_head(token, head);
    }
  }

  void work(int thread) {
    const Own own(rotation_);
    for (Units units; (units = queue_.next(thread)).count > 0;) {
      const Units left = queue_.first(thread);
      attend(units.first, own,
             left.count > 0 ? span(left.first, parts_.begin(left.first)) : Span{});
    }
  }

 private:
  std::int64_t stride() const { return (rotation_.heads + 2 * rotation_.kv_heads) * rotation_.size; }

  // What a thread has of its own, and finds in its caches: queries of a unit, and what it keeps of
  // one that is a request's only part.
  struct Own {
    float* kept;             // [heads][size + 2], see Kept
    std::uint16_t* queries;  // [heads][size]

    explicit Own(const Rotation& rotation) {
      const std::int64_t heads = rotation.heads / rotation.kv_heads;
      const std::int64_t floats = heads * (rotation.size + 2);
      kept = scratch(static_cast<std::size_t>(floats + heads * rotation.size / 2), kOwnHeads);
      queries = reinterpret_cast<std::uint16_t*>(kept + floats);
    }
  };

  std::uint16_t* queries_of(std::int64_t token, std::int64_t head) const {
    return qkv_ + token * stride() + head * each_ * rotation_.size;
  }

  void turn_queries(std::int64_t token, std::uint16_t* queries) const {
    turn_heads(rotation_, queries, each_, rotation_.query_norm, requests_.positions[token]);
  }

  void write_head(std::int64_t token, std::int64_t head) const {
    const std::int64_t size = rotation_.size;
    std::uint16_t* key = qkv_ + token * stride() + (rotation_.heads + head) * size;
    turn_heads(rotation_, key, 1, rotation_.key_norm, requests_.positions[token]);
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

  Kept kept(std::int64_t unit, const Own& own) const {
    const std::int64_t group = parts_.group(unit), rows = parts_.rows(group);
    const std::int64_t size = rotation_.size, heads = rows * each_;
    const bool is_whole = parts_.of(group) == 1 && rows == 1;
    float* sums = is_whole ? own.kept
                           : partial_ + parts_.rows_before(unit) * each_ * (size + 2);
    return {sums, sums + heads * size, sums + heads * (size + 1)};
  }

  // Neighbouring tokens of a group's requests, and a head of keys.
  struct Span {
    std::int64_t group, head, begin, tokens;
  };

  // Up to 128 tokens of a unit, from one on.
  Span span(std::int64_t unit, std::int64_t begin) const {
    const std::int64_t group = parts_.group(unit);
    const std::int64_t end = std::min(parts_.end(unit), parts_.length(group));
    return {group, parts_.head(unit), begin, std::clamp<std::int64_t>(end - begin, 0, kChunk)};
  }

  // `next` are the first tokens of the thread's next unit.
  void attend(std::int64_t unit, const Own& own, const Span& next) {
    const std::int64_t group = parts_.group(unit), head = parts_.head(unit);
    const std::int64_t heads = parts_.rows(group) * each_;
    if (!writes_first() && parts_.is_last(unit)) write_head(parts_.request(group), head);
    const std::uint16_t* q = queries(unit, own);
    const Kept to = kept(unit, own);
    std::memset(to.sums, 0, heads * rotation_.size * sizeof(float));
    std::fill_n(to.largest, heads, -std::numeric_limits<float>::infinity());
    std::fill_n(to.shares, heads, 0.0f);
    for (Span now = span(unit, parts_.begin(unit)), more; now.tokens > 0; now = more) {
      more = span(unit, now.begin + kChunk);
      const Span& ahead = more.tokens > 0 ? more : next;
      for (std::int64_t query = 0; query < heads; query += kGroup) {
        const std::int64_t some = std::min<std::int64_t>(kGroup, heads - query);
        attend(now, query == 0 ? ahead : Span{}, q, query, some, to);
      }
    }
    std::atomic<int>& missing = missing_[group * rotation_.kv_heads + head];
    if (missing.fetch_sub(1, std::memory_order_acq_rel) == 1) finish(group, head, own);
  }

  // Queries of a unit, [heads][size]: those of several requests are brought together.  Where nobody
  // has rotated them before, each part has its own.
  const std::uint16_t* queries(std::int64_t unit, const Own& own) const {
    const std::int64_t group = parts_.group(unit), some = each_ * rotation_.size;
    const std::int64_t request = parts_.request(group);
    const std::uint16_t* from = queries_of(request, parts_.head(unit));
    if (!writes_first()) {
      std::memcpy(own.queries, from, some * sizeof(std::uint16_t));
      turn_queries(request, own.queries);
      return own.queries;
    }
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

  // Some of the heads that share one of keys, to what is kept of all; `next` comes into the
  // second-level cache meanwhile.
  void attend(const Span& span, const Span& next, const std::uint16_t* q, std::int64_t query,
              std::int64_t heads, const Kept& to) const {
    const std::int64_t size = rotation_.size;
    float scores[kGroup * kChunk + kSpan];  // the last: read, and not used
    score(span, next, q + query * size, heads, scores);
    for (std::int64_t head = 0; head < heads; ++head) {
      const std::int64_t all = query + head, request = request_of(span, all);
      const std::int64_t tokens = tokens_of(span, all);
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
    add_values(span, next, query, heads, scores, to.sums + query * size);
  }

  // Of a head of a group's queries: its request, and how many of some tokens that one sees.
  std::int64_t request_of(const Span& span, std::int64_t head) const {
    return parts_.request(span.group) + head / each_;
  }
  std::int64_t tokens_of(const Span& span, std::int64_t head) const {
    const std::int64_t left = requests_.lengths[request_of(span, head)] - span.begin;
    return std::clamp<std::int64_t>(left, 0, span.tokens);
  }

  // Where keys and values of 32 tokens are, from one on.
  struct Place {
    const std::uint16_t *keys, *values;
  };

  Place place(const Span& span, std::int64_t token) const {
    const std::int64_t size = rotation_.size, block = requests_.block;
    const std::int64_t at = (span.begin + token) % block;
    const std::uint16_t* keys = keys_of_token(span.group, span.head, span.begin + token);
    const std::uint16_t* values = keys + block * size;
    if (requests_.layout == Layout::kRows) return {keys + at, values + at * size};
    return {keys + at * size, values + at * kTile};
  }

  // The next ones; where there are none, these, which are in a cache.
  Place place_ahead(const Span& next, std::int64_t token, const Place& own) const {
    return token < next.tokens ? place(next, token) : own;
  }

  void score(const Span& span, const Span& next, const std::uint16_t* q, std::int64_t heads,
             float* scores) const {
    for (std::int64_t token = 0; token < span.tokens; token += kSpan) {
      const Place own = place(span, token), ahead = place_ahead(next, token, own);
      kernels().score[heads - 1](q, rotation_.size, own.keys, requests_.block, ahead.keys,
                                 scores + token);
    }
  }

  // Of heads from `query` on, whose requests become longer.  What one does not see may be NaN, and
  // must not be multiplied, not even with 0.  Values come in pairs of tokens, as where it is alone.
  void add_values(const Span& span, const Span& next, std::int64_t query, std::int64_t heads,
                  float* shares, float* sums) const {
    const std::int64_t least = tokens_of(span, query), most = tokens_of(span, query + heads - 1);
    const std::int64_t together = least == most ? most : least / 2 * 2;
    for (std::int64_t token = 0; token < together; token += kSpan) {
      const Place own = place(span, token), ahead = place_ahead(next, token, own);
      add_values(own, ahead, std::min(kSpan, together - token), heads, shares + token, sums);
    }
    if (least == most) return;
    std::fill_n(shares + kGroup * kChunk, kSpan, 0.0f);
    for (std::int64_t token = together; token < span.tokens; token += 2) {
      const Place own = place(span, token);
      for (std::int64_t head = 0, end = 0; head < heads; head = end) {
        const std::int64_t seen = std::min<std::int64_t>(tokens_of(span, query + head) - token, 2);
        do ++end; while (end < heads && (seen == 2 || tokens_of(span, query + end) - token == seen));
        if (seen > 0) {
          add_values(own, own, seen, end - head, shares + head * kChunk + token,
                     sums + head * rotation_.size);
        }
      }
    }
  }

  // Up to 32 tokens' values to the sums of some heads.
  void add_values(const Place& own, const Place& ahead, std::int64_t tokens, std::int64_t heads,
                  const float* shares, float* sums) const {
    const std::int64_t size = rotation_.size, block = requests_.block;
    const std::int64_t step = requests_.layout == Layout::kTiles ? block : 1;
    for (std::int64_t i = 0; i < size; i += kSpan) {
      kernels().add_values[heads - 1](shares, own.values + i * step, block, tokens, size,
                                      ahead.values + i * step, sums + i);
    }
  }

  void scale(float* sums, float by) const {
    for (std::int64_t i = 0; i < rotation_.size; i += kTile) {
      store_floats(sums + i, times(load_floats(sums + i), spread(by)));
    }
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
  void finish(std::int64_t group, std::int64_t head, const Own& own) const {
    const std::int64_t size = rotation_.size, parts = parts_.of(group);
    const auto of_part = [&](std::int64_t part) {
      return kept(parts_.unit(group, head, part), own);
    };
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

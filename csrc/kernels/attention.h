// Attention of a decode step: one token of each request over its KV blocks, in vLLM's layouts.
//
// Requests are cut into parts, at most 64 of them; a unit is a part and a head of keys, with the
// heads of queries that share it.  Threads take units as in linear.h, and who computes
// the last part of a head puts its parts together, in their order: the result depends neither on
// the number of threads nor on chance.  The softmax of parts is that of Dao et al.,
// "Flash-Decoding for long-context inference", 2023.

#pragma once

#include "rotation.h"
#include "linear.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

namespace ray_hetero {

constexpr std::int64_t kChunk = 128;    // tokens whose scores are kept; parts are multiples of it
constexpr std::int64_t kMostParts = 64;  // of a request
constexpr std::int64_t kSpan = 32;      // tokens at once; blocks are multiples of it
constexpr std::int64_t kMostHeads = 8;  // of queries at once

// How keys and values of a head lie in a block; `isa` of vLLM's cpu_attn_reshape_and_cache.
enum class Layout {
  kTiles,  // "amx": keys [block / 16][size / 2][16][2], values [size / 16][block / 2][16][2]
  kRows,   // "vec": keys [size][block], values [block][size]
};

// Keys and values of a layer: [blocks][kv heads], keys of a block first, then its values.
struct Cache {
  std::uint16_t* data;
  std::int64_t block_stride, head_stride;  // elements
};

// What is the same for all layers.
struct Requests {
  std::int64_t m = 0;                      // requests, a token each
  const std::int64_t* positions = nullptr; // [m]
  const std::int64_t* slots = nullptr;     // [m], where keys and values go; negative: nowhere
  const std::int32_t* lengths = nullptr;   // [m], tokens with this one
  const std::int32_t* blocks = nullptr;    // [m][most_blocks]
  std::int64_t most_blocks = 0;
  std::int64_t block = 0;  // tokens of a block
  Layout layout = Layout::kRows;
};

#if defined(__x86_64__)

// sums += values · by(head) for each head, in float.
template <int kHeads, typename By>
RAY_HETERO_BF16 RAY_HETERO_INLINE void add_scaled(const std::uint16_t* values, By by,
                                                  Sums<kHeads>& sums) {
  const __m512 left = load_bf16(values), right = load_bf16(values + kTile);
  for (int head = 0; head < kHeads; ++head) {
    const __m512 one = _mm512_set1_ps(by(head));
    sums.left[head] = _mm512_fmadd_ps(left, one, sums.left[head]);
    sums.right[head] = _mm512_fmadd_ps(right, one, sums.right[head]);
  }
}

// Scores of 32 tokens: [kHeads][kChunk] = q [kHeads][size] · keys.
template <int kHeads>
RAY_HETERO_BF16 void score_tiles(const std::uint16_t* q, std::int64_t size,
                                 const std::uint16_t* keys, std::int64_t, float* scores) {
  Sums<kHeads> sums;
  sums.clear();
  const std::uint16_t* next = keys + kTile * size;
  for (std::int64_t at = 0; at < size; at += 2, keys += 2 * kTile, next += 2 * kTile) {
    add_row(q + at, size, _mm512_loadu_si512(keys), _mm512_loadu_si512(next), sums);
  }
  sums.store(scores, kChunk);
}

template <int kHeads>
RAY_HETERO_BF16 void score_rows(const std::uint16_t* q, std::int64_t size,
                                const std::uint16_t* keys, std::int64_t block, float* scores) {
  Sums<kHeads> sums;
  sums.clear();
  for (std::int64_t at = 0; at < size; ++at, keys += block) {
    add_scaled(keys, [&](int head) { return as_float(q[head * size + at]); }, sums);
  }
  sums.store(scores, kChunk);
}

// Sums of 32 elements of values: [kHeads][stride] += shares of up to 32 tokens · values.
template <int kHeads>
RAY_HETERO_BF16 void add_tiles_of_values(const float* shares, const std::uint16_t* values,
                                         std::int64_t block, std::int64_t stride, float* to) {
  // As vLLM's kernel multiplies them, in bf16.
  std::uint16_t rounded_shares[kHeads][kSpan];
  for (int head = 0; head < kHeads; ++head) {
    store_bf16(rounded_shares[head], _mm512_loadu_ps(shares + head * kChunk));
    store_bf16(rounded_shares[head] + kTile, _mm512_loadu_ps(shares + head * kChunk + kTile));
  }
  Sums<kHeads> sums;
  sums.load(to, stride);
  const std::uint16_t* next = values + kTile * block;
  for (std::int64_t at = 0; at < kSpan; at += 2, values += 2 * kTile, next += 2 * kTile) {
    add_row(rounded_shares[0] + at, kSpan, _mm512_loadu_si512(values), _mm512_loadu_si512(next),
            sums);
  }
  sums.store(to, stride);
}

template <int kHeads>
RAY_HETERO_BF16 void add_rows_of_values(const float* shares, const std::uint16_t* values,
                                        std::int64_t, std::int64_t stride, float* to) {
  Sums<kHeads> sums;
  sums.load(to, stride);
  for (std::int64_t at = 0; at < kSpan; ++at, values += stride) {
    add_scaled(values, [&](int head) { return shares[head * kChunk + at]; }, sums);
  }
  sums.store(to, stride);
}

using Score = void (*)(const std::uint16_t*, std::int64_t, const std::uint16_t*, std::int64_t,
                       float*);
constexpr Score kScore[2][kMostHeads + 1] = {
    {nullptr, score_tiles<1>, score_tiles<2>, score_tiles<3>, score_tiles<4>, score_tiles<5>,
     score_tiles<6>, score_tiles<7>, score_tiles<8>},
    {nullptr, score_rows<1>, score_rows<2>, score_rows<3>, score_rows<4>, score_rows<5>,
     score_rows<6>, score_rows<7>, score_rows<8>},
};
using AddValues = void (*)(const float*, const std::uint16_t*, std::int64_t, std::int64_t, float*);
constexpr AddValues kAddValues[2][kMostHeads + 1] = {
    {nullptr, add_tiles_of_values<1>, add_tiles_of_values<2>, add_tiles_of_values<3>,
     add_tiles_of_values<4>, add_tiles_of_values<5>, add_tiles_of_values<6>,
     add_tiles_of_values<7>, add_tiles_of_values<8>},
    {nullptr, add_rows_of_values<1>, add_rows_of_values<2>, add_rows_of_values<3>,
     add_rows_of_values<4>, add_rows_of_values<5>, add_rows_of_values<6>, add_rows_of_values<7>,
     add_rows_of_values<8>},
};

// The units of a step, the same for all its layers.
class Parts {
 public:
  explicit Parts(const Requests& requests, std::int64_t kv_heads)
      : kv_heads_(kv_heads), first_(requests.m + 1) {
    for (std::int64_t request = 0; request < requests.m; ++request) {
      const std::int64_t chunks = (requests.lengths[request] + kChunk - 1) / kChunk;
      const std::int64_t of_part = (chunks + kMostParts - 1) / kMostParts;
      const std::int64_t parts = (chunks + of_part - 1) / of_part;
      tokens_.push_back(of_part * kChunk);
      first_[request + 1] = first_[request] + parts;
      requests_.insert(requests_.end(), parts, request);
    }
  }

  std::int64_t units() const { return first_.back() * kv_heads_; }
  std::int64_t of(std::int64_t request) const { return first_[request + 1] - first_[request]; }
  std::int64_t request(std::int64_t unit) const { return requests_[unit / kv_heads_]; }
  std::int64_t head(std::int64_t unit) const { return unit % kv_heads_; }
  // The first of a unit's tokens, and behind the last if the request were longer.
  std::int64_t begin(std::int64_t unit) const {
    const std::int64_t of = request(unit);
    return (unit / kv_heads_ - first_[of]) * tokens_[of];
  }
  std::int64_t end(std::int64_t unit) const { return begin(unit) + tokens_[request(unit)]; }
  std::int64_t unit(std::int64_t request, std::int64_t head, std::int64_t part) const {
    return (first_[request] + part) * kv_heads_ + head;
  }

 private:
  std::int64_t kv_heads_;
  std::vector<std::int64_t> first_;     // part of each request
  std::vector<std::int64_t> requests_;  // of each part
  std::vector<std::int64_t> tokens_;    // of a part of each request
};

// A layer's: `qkv` [m][queries, keys, values] → `attended` [m][queries], both bf16; the latter
// is as `places` says.
class Attention {
 public:
  Attention(const Rotation& rotation, float scale, const Cache& cache, const Requests& requests,
            const Parts& parts, std::uint16_t* qkv, std::uint16_t* attended,
            const Places& places)
      : rotation_(rotation), scale_(scale * kLog2E), cache_(cache), requests_(requests),
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
    for (std::int64_t query = 0; query < each_; query += kMostHeads) {
      attend(unit, query, std::min(kMostHeads, each_ - query));
    }
    std::atomic<int>& missing = missing_[request * rotation_.kv_heads + head];
    if (missing.fetch_sub(1, std::memory_order_acq_rel) == 1) finish(request, head);
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
      float scores[kMostHeads * kChunk];
      score(span, query, heads, scores);
      for (std::int64_t head = 0; head < heads; ++head) {
        const float before = largest[head];
        const float more = soften(scores + head * kChunk, span.tokens, largest[head]);
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
      kScore[tiles ? 0 : 1][heads](q, size, keys + (tiles ? at * size : at), block,
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
        kAddValues[tiles ? 0 : 1][heads](shares + token,
                                         values + (tiles ? i * block + at * kTile : at * size + i),
                                         block, size, sums + i);
      }
    }
  }

  RAY_HETERO_BF16 void scale(float* sums, float by) const {
    for (std::int64_t i = 0; i < rotation_.size; i += kTile) {
      _mm512_storeu_ps(sums + i, _mm512_mul_ps(_mm512_loadu_ps(sums + i), _mm512_set1_ps(by)));
    }
  }

  // The values of 32 tokens of a block, and where tiles are, the keys of the next.
  void prefetch(const std::uint16_t* keys, std::int64_t at) const {
    const std::int64_t size = rotation_.size, block = requests_.block;
    const std::uint16_t* values = keys + block * size;
    if (requests_.layout == Layout::kRows) {
      prefetch_elements<_MM_HINT_T1>(values + at * size, kSpan * size);
      return;
    }
    prefetch_elements<_MM_HINT_T0>(keys + (at + kSpan) * size, kSpan * size);
    for (std::int64_t i = 0; i < size; i += kTile) {
      prefetch_elements<_MM_HINT_T1>(values + i * block + at * kTile, kSpan * kTile);
    }
  }

  template <_mm_hint kHint>
  static void prefetch_elements(const std::uint16_t* at, std::int64_t elements) {
    constexpr std::int64_t kLine = kLineBytes / sizeof(std::uint16_t);
    for (std::int64_t i = 0; i < elements; i += kLine) {
      _mm_prefetch(reinterpret_cast<const char*>(at + i), kHint);
    }
  }

  // Scores of some tokens become 2^(score − largest), those of the others of the last 32 become 0.
  // `largest` is that of tokens before, and grows; returns the sum.
  RAY_HETERO_BF16 float soften(float* scores, std::int64_t tokens, float& largest) const {
    const __m512 scale = _mm512_set1_ps(scale_);
    __m512 most = _mm512_set1_ps(largest);
    for (std::int64_t token = 0; token < tokens; token += kTile) {
      const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(scores + token), scale);
      _mm512_storeu_ps(scores + token, scaled);
      most = _mm512_mask_max_ps(most, there(tokens - token), most, scaled);
    }
    largest = _mm512_reduce_max_ps(most);
    const __m512 from = _mm512_set1_ps(largest);
    __m512 all = _mm512_setzero_ps();
    for (std::int64_t token = 0; token < (tokens + kSpan - 1) / kSpan * kSpan; token += kTile) {
      const __m512 power = power_of_two(_mm512_sub_ps(_mm512_loadu_ps(scores + token), from));
      const __m512 share = _mm512_maskz_mov_ps(there(tokens - token), power);
      _mm512_storeu_ps(scores + token, share);
      all = _mm512_add_ps(all, share);
    }
    return _mm512_reduce_add_ps(all);
  }

  static __mmask16 there(std::int64_t tokens) {
    return static_cast<__mmask16>((1u << std::clamp<std::int64_t>(tokens, 0, kTile)) - 1);
  }

  // Put the parts of a head together.
  RAY_HETERO_BF16 void finish(std::int64_t request, std::int64_t head) const {
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
      float* whole = kept(0) + query * size;
      for (std::int64_t part = 0; part < parts; ++part) {
        const float* from = kept(part);
        const float weight = std::exp2(from[largest_at] - largest);
        sum += weight * from[sum_at];
        for (std::int64_t i = 0; i < size; i += kTile) {
          const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(from + query * size + i),
                                              _mm512_set1_ps(weight));
          _mm512_storeu_ps(whole + i, part == 0 ? scaled
                                                : _mm512_add_ps(_mm512_loadu_ps(whole + i), scaled));
        }
      }
      const __m512 share = _mm512_set1_ps(1.0f / sum);
      const std::int64_t first = (head * each_ + query) * size;
      for (std::int64_t i = 0; i < size; i += kTile) {
        store_bf16(attended_ + places_.at(request, first + i),
                   _mm512_mul_ps(_mm512_loadu_ps(whole + i), share));
      }
    }
  }

  const Rotation& rotation_;
  const float scale_;
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

#endif

}  // namespace ray_hetero

// A layer with multi-head latent attention, up to the norm before its MLP or experts, in one
// parallel region:
//
//   r ← r + h    [c | l | k] ← D·norm(r)    q ← Q·norm(c)    cache ← norm(l), turned k
//   queries ← [Kᵀ·q | turned q]    a ← attention of queries to the cache    r ← r + O·(V·a)
//
// where c, l and k are the latent of queries (in models without one Q multiplies norm(r)), that of keys
// and values, and the rotated part of keys; K and V are what would make keys and values of a latent,
// for each head by itself.
//
// Rounding is that of vLLM's operators: what each gives is bf16.  Of a tensor-parallel group Q, K, V
// and O are of the rank's heads; the sums of O·(V·a) over all ranks are rounded once.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "few_tokens.h"
#include "latent_attention.h"
#include "layers.h"
#include "post_attention.h"
#include "rotation.h"
#include "scratch.h"
#include "team.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

// A product of each head's vectors with its own part of a weight [heads · outputs, k].
//
// Tokens(head, first, count) gives the tiles of `count` tokens from `first` on, store(head, output,
// first, count, sums) takes sums [count][kBlock] of neighbouring outputs from one on.
template <typename Tokens, typename Store>
class HeadProduct {
 public:
  HeadProduct(const Weight& w, std::int64_t heads, std::int64_t m, const Tokens& tokens,
              const Store& store)
      : w_(w), of_head_(w.blocks() / heads), m_(m), tokens_(tokens), store_(store),
        queue_(w.blocks(), omp_get_max_threads()) {}

  // A thread's own memory, which it has to have before it begins to work.
  static void reserve_own(std::int64_t m) {
    const std::int64_t few = std::min(m, kFewTokens);
    scratch(few * kBlock, kOwnSums);
    reserve_few(few);
  }

  // The first weights of this thread's share.
  ReadAhead ahead(int thread) const {
    const Units units = queue_.first(thread);
    if (units.count == 0) return {nullptr, 0};
    const Stretch stretch = w_.stretch(units.first, 0, w_.pairs());
    return {stretch.data, units.count * w_.pairs() / 2 * stretch.pair_bytes};
  }

  void work(int thread) {
    Tokens tokens = tokens_;  // which may keep what they have packed
    TileSetUp set_up;
    for (Units units; (units = queue_.next(thread, of_head_)).count > 0;) {
      for (std::int64_t i = 0; i < units.count; ++i) block(units.first + i, tokens, set_up);
    }
    if constexpr (kHasTiles) release_tiles();
  }

 private:
  void block(std::int64_t block, Tokens& tokens, TileSetUp& set_up) const {
    const std::int64_t head = block / of_head_;
    const Stretch stretch = w_.stretch(block, 0, w_.pairs());
    float* sums = scratch(std::min(m_, kFewTokens) * kBlock, kOwnSums);
    // Of more tokens than 32, the others find the block in a cache.
    for (std::int64_t first = 0; first < m_; first += kFewTokens) {
      const std::int64_t count = std::min(kFewTokens, m_ - first);
      const TokenTiles x = tokens(head, first, count);
      set_up.for_tokens(count);
      sum_few(x, count, stretch, sums);
      store_(head, block % of_head_ * kBlock, first, count, sums);
    }
  }

  const Weight& w_;
  const std::int64_t of_head_, m_;  // blocks of a head, and tokens
  const Tokens tokens_;
  const Store store_;
  WorkQueue queue_;
};

class LatentStep {
 public:
  LatentStep(const LatentLayer& layer, const LatentCache& cache, const Requests& requests,
             const Step& step)
      : layer_(layer), shape_(layer.shape), cache_(cache), requests_(requests), step_(step),
        m_(requests.m),
        parts_(requests, 1, Scores::kNoWindow,
               std::clamp<std::int64_t>(kLatentParts / requests.m, 1, kMostParts)),
        normed_places_{m_, layer.down.w.k(), kHasTiles},
        query_latent_places_{m_, layer.query_latent(), kHasTiles},
        value_places_{m_, shape_.heads * shape_.value, kHasTiles} {
    Product::reserve(layer.down, m_);
    Product::reserve(layer.queries, m_);
    PostAttentionBlock::reserve(layer.behind, m_);
    const std::int64_t down = layer.down.w.n(), queries = layer.queries.w.n();
    const std::int64_t latents = shape_.heads * shape_.latent;
    const std::int64_t sizes[] = {normed_places_.stride, down, query_latent_places_.stride, queries,
                                  shape_.heads * shape_.size(), latents, value_places_.stride};
    std::int64_t all = 0;
    for (const std::int64_t size : sizes) all += size * m_;
    std::uint16_t* at = scratch_bf16(all, kLatents);
    std::uint16_t** const places[] = {&normed_, &down_, &query_latent_, &queries_,
                                      &absorbed_, &attended_, &values_};
    for (std::size_t i = 0; i < std::size(sizes); ++i) {
      *places[i] = at;
      at += sizes[i] * m_;
    }
    down_task_ = task_of(layer.down, normed_, normed_places_, down_);
    down_product_.emplace(layer.down, down_task_, nullptr);
    queries_task_ = layer.query_norm
                        ? task_of(layer.queries, query_latent_, query_latent_places_, queries_)
                        : task_of(layer.queries, normed_, normed_places_, queries_);
    queries_product_.emplace(layer.queries, queries_task_, nullptr);
    to_latent_.emplace(layer.to_latent, shape_.heads, m_, QueryTokens{this}, StoreAbsorbed{this});
    attention_.emplace(shape_, layer.scale, cache, requests, parts_, absorbed_, attended_);
    from_latent_.emplace(layer.from_latent, shape_.heads, m_, AttendedTokens{this},
                         StoreValues{this});
    behind_.emplace(layer.behind, values_, value_places_, step.sum, step.sum, step.y, nullptr);
  }
  LatentStep(const LatentStep&) = delete;  // its products refer to it
  LatentStep& operator=(const LatentStep&) = delete;

  void run() {
    together([this] { reserve_own(); },
             [this](int thread, int threads, Barrier& barrier) { work(thread, threads, barrier); });
    if (layer_.behind.sums != nullptr) layer_.behind.sums->check();
  }

 private:
  // The plain part of a head's queries.
  struct QueryTokens {
    const LatentStep* step;
    std::int64_t head = -1, first = -1;  // of those that are packed

    TokenTiles operator()(std::int64_t of, std::int64_t begin, std::int64_t count) {
      const LatentHeads& shape = step->shape_;
      const std::int64_t stride = shape.heads * shape.query();
      const std::uint16_t* x = step->queries_ + begin * stride + of * shape.query();
      // One token lies as it would in a tile.
      if (!kHasTiles) return Places{count, stride, false}.tiles(x, 0);
      const Places places{count, shape.plain, true};
      if (count == 1) return places.tiles(x, 0);
      std::uint16_t* tiles = scratch_bf16(count * shape.plain, kOwnTokens);
      if (head != of || first != begin) {
        const Task task{x, step->layer_.to_latent, nullptr, nullptr, count, stride};
        pack_tokens(task, 0, shape.plain / (2 * kTile), tiles);
        head = of, first = begin;
      }
      return places.tiles(tiles, 0);
    }
  };

  struct StoreAbsorbed {
    const LatentStep* step;

    void operator()(std::int64_t head, std::int64_t output, std::int64_t first, std::int64_t count,
                    const float* sums) const {
      const LatentHeads& shape = step->shape_;
      for (std::int64_t token = first; token < first + count; ++token, sums += kBlock) {
        std::uint16_t* to = step->absorbed_ + (token * shape.heads + head) * shape.size() + output;
        store_bf16(to, load_floats(sums));
        store_bf16(to + kLanes, load_floats(sums + kLanes));
      }
    }
  };

  // What a head has attended to.
  struct AttendedTokens {
    const LatentStep* step;

    TokenTiles operator()(std::int64_t head, std::int64_t first, std::int64_t count) const {
      const std::int64_t latent = step->shape_.latent;
      const std::uint16_t* x = step->attended_ + (head * step->m_ + first) * latent;
      return Places{count, latent, kHasTiles}.tiles(x, 0);
    }
  };

  struct StoreValues {
    const LatentStep* step;

    void operator()(std::int64_t head, std::int64_t output, std::int64_t first, std::int64_t count,
                    const float* sums) const {
      const std::int64_t at = head * step->shape_.value + output;
      for (std::int64_t token = first; token < first + count; ++token, sums += kBlock) {
        std::uint16_t* to = step->values_ + step->value_places_.at(token, at);
        store_bf16(to, load_floats(sums));
        store_bf16(to + kLanes, load_floats(sums + kLanes));
      }
    }
  };

  // A thread's own memory.
  void reserve_own() const {
    FewTokens::reserve_own(down_task_);
    FewTokens::reserve_own(queries_task_);
    HeadProduct<QueryTokens, StoreAbsorbed>::reserve_own(m_);
    scratch_bf16(std::min(m_, kFewTokens) * shape_.plain, kOwnTokens);
    LatentAttention::reserve_own(shape_);
    behind_->reserve_own();
  }

  void work(int thread, int threads, Barrier& barrier) {
    ReadAhead down = down_product_->ahead(thread);
    add_and_norm_some(thread, threads, {step_.hidden, step_.residual}, layer_.norm, step_.sum,
                      normed_, normed_places_);
    barrier.wait(down);
    down_product_->work(thread, threads);
    ReadAhead queries = queries_product_->ahead(thread);
    barrier.wait(queries);
    norm_and_cache(thread, threads);
    if (layer_.query_norm) barrier.wait(queries);
    queries_product_->work(thread, threads);
    ReadAhead to_latent = to_latent_->ahead(thread);
    barrier.wait(to_latent);
    turn_queries(thread, threads);
    to_latent_->work(thread);
    ReadAhead from_latent = from_latent_->ahead(thread);
    barrier.wait(from_latent);
    attention_->pack(thread, threads);
    barrier.wait(from_latent);
    attention_->work(thread);
    barrier.wait(from_latent);
    attention_->finish(thread, threads);
    barrier.wait(from_latent);
    from_latent_->work(thread);
    ReadAhead output = behind_->ahead(thread);
    barrier.wait(output);
    behind_->work(thread, threads, barrier);
  }

  // Of each token the latent of queries is normalised by one thread, the rest is cached by another.
  void norm_and_cache(int thread, int threads) const {
    for (std::int64_t i = thread; i < 2 * m_; i += threads) {
      const std::int64_t token = i / 2;
      if (i % 2 == 1) {
        cache_token(token);
      } else if (layer_.query_norm) {
        const std::uint16_t* from = down_ + token * layer_.down.w.n();
        normalise(
            *layer_.query_norm, query_latent_places_.stride,
            [&](std::int64_t at) { return load_bf16(from + at); },
            [&](std::int64_t at, Floats, Floats normed) {
              store_bf16(query_latent_ + query_latent_places_.at(token, at), normed);
            });
      }
    }
  }

  void cache_token(std::int64_t token) const {
    const std::int64_t slot = requests_.slots[token];
    if (slot < 0) return;
    const std::uint16_t* from = down_ + token * layer_.down.w.n() + layer_.query_latent();
    std::uint16_t* to = cache_.data + slot / requests_.block * cache_.block_stride +
                        slot % requests_.block * cache_.token_stride;
    normalise(
        layer_.latent_norm, shape_.latent, [&](std::int64_t at) { return load_bf16(from + at); },
        [&](std::int64_t at, Floats, Floats normed) { store_bf16(to + at, normed); });
    turn(from + shape_.latent, token, to + shape_.latent);
  }

  void turn_queries(int thread, int threads) const {
    const std::int64_t all = m_ * shape_.heads;
    for (std::int64_t i = all * thread / threads; i < all * (thread + 1) / threads; ++i) {
      turn(queries_ + i * shape_.query() + shape_.plain, i / shape_.heads,
           absorbed_ + i * shape_.size() + shape_.latent);
    }
  }

  void turn(const std::uint16_t* from, std::int64_t token, std::uint16_t* to) const {
    std::memcpy(to, from, shape_.rotated * sizeof(std::uint16_t));
    turn_heads(layer_.rotation, to, 1, std::nullopt, requests_.positions[token]);
  }

  const LatentLayer& layer_;
  const LatentHeads& shape_;
  const LatentCache& cache_;
  const Requests& requests_;
  const Step& step_;
  const std::int64_t m_;
  const Parts parts_;
  const Places normed_places_, query_latent_places_, value_places_;
  std::uint16_t *normed_, *down_, *query_latent_, *queries_;
  std::uint16_t* absorbed_;  // queries [m][heads][latent, rotated]
  std::uint16_t* attended_;  // [heads][m][latent]
  std::uint16_t* values_;    // [m][heads · value] at `value_places_`
  Task down_task_{}, queries_task_{};
  std::optional<Product> down_product_, queries_product_;
  std::optional<HeadProduct<QueryTokens, StoreAbsorbed>> to_latent_;
  std::optional<LatentAttention> attention_;
  std::optional<HeadProduct<AttendedTokens, StoreValues>> from_latent_;
  std::optional<PostAttentionBlock> behind_;
};

inline void run(const LatentLayer& layer, const LatentCache& cache, const Requests& requests,
                const Step& step) {
  LatentStep(layer, cache, requests, step).run();
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

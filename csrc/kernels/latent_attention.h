// Multi-head latent attention of a decode step: one token of each request over its cached latents, in
// vLLM's layout [blocks][tokens of a block][latent, rotated part of the key].
//
// All heads attend to the same latents, which are keys with their rotated part and values without it.
// So a part's latents are read once for all heads: queries are packed like a weight, whose outputs are
// heads, and latents are its tokens; then latents are packed like a weight, whose inputs are tokens,
// and the heads' shares are what is multiplied with it.  Both are what products of linear layers are
// made of, with tiles and without.
//
// Requests are cut into parts as in attention.h; each keeps the sums of all its heads, which are put
// together once all threads have come.  The result depends neither on the number of threads nor on
// chance.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "attention_parts.h"
#include "expert_tokens.h"
#include "latent_chunks.h"
#include "latent_lanes.h"
#include "latent_scores.h"
#include "layers.h"
#include "pieces.h"
#include "scratch.h"
#include "team.h"
#include "tiles.h"
#include "work_queue.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

// A layer's: queries [m][heads][size], bf16 → attended [heads][m][latent], bf16, the tokens of a head
// in groups of 32 as place_among() says.
class LatentAttention {
 public:
  LatentAttention(const LatentHeads& shape, float scale, const LatentCache& cache,
                  const Requests& requests, const Parts& parts, const std::uint16_t* queries,
                  std::uint16_t* attended)
      : shape_(shape), scale_(scale), cache_(cache), requests_(requests), parts_(parts),
        lanes_(parts, shape.heads), chunks_(shape, cache, requests, parts), queries_(queries),
        attended_(attended),
        packed_(scratch_bf16(packed(shape, lanes_), kGathered)),
        queue_(parts.units(), omp_get_max_threads()) {
    std::int64_t floats = 0;
    for (std::int64_t group = 0; group < parts.groups(); ++group) {
      first_.push_back(floats);
      floats += parts.of(group) * lanes_.blocks(group) * kept_floats();
    }
    partial_ = scratch(static_cast<std::size_t>(floats), kPartial);
  }

  // A thread's own memory, which it has to have before it begins to work.
  static void reserve_own(const LatentHeads& shape) {
    own_latents(shape);
    OwnScores();
  }

  // Bring the queries into the order in which they are multiplied: a thread's share.  All must have
  // come before work().
  void pack(int thread, int threads) const {
    const std::int64_t steps = shape_.size() / (2 * kTile), all = lanes_.all_blocks() * steps;
    for (std::int64_t i = all * thread / threads; i < all * (thread + 1) / threads; ++i) {
      pack(i / steps, i % steps);
    }
  }

  void work(int thread) {
    TileSetUp set_up;
    set_up.for_tokens(kFewTokens);
    for (Units units; (units = queue_.next(thread)).count > 0;) attend(units.first);
    if constexpr (kHasTiles) release_tiles();
  }

  // Put the parts of some heads together: a thread's share, once all parts are there.
  void finish(int thread, int threads) const {
    const std::int64_t all = requests_.m * shape_.heads;
    for (std::int64_t i = all * thread / threads; i < all * (thread + 1) / threads; ++i) {
      finish_head(i / shape_.heads, i % shape_.heads);
    }
  }

 private:
  static constexpr float kHidden = -1e30f;  // finite, so that no NaN comes of it

  static std::size_t packed(const LatentHeads& shape, const LatentLanes& lanes) {
    return static_cast<std::size_t>(lanes.all_blocks() * kBlock * shape.size());
  }

  // ---- memory ------------------------------------------------------------------------------------

  // Latents of a chunk [latent / 32][kChunkPairs][32][2]: rows of a weight.
  static std::uint16_t* own_latents(const LatentHeads& shape) {
    return scratch_bf16(kChunk * shape.latent, kOwnLatents);
  }

  struct OwnScores {
    float* scores;          // [kChunk][kBlock]
    std::uint16_t* pairs;   // [kChunkPairs][16 lanes][2]
    std::uint16_t* shares;  // of each lane's tokens, as shares_at() says

    OwnScores()
        : scores(scratch(kChunk * kBlock + kChunkPairs * kTile + kChunk * kBlock / 2, kOwnScores)),
          pairs(reinterpret_cast<std::uint16_t*>(scores + kChunk * kBlock)),
          shares(pairs + kChunk * kTile) {}
  };
  // Of a lane's pair of tokens: tiles of 32 tokens where there are any, else row by row.
  static std::int64_t shares_at(std::int64_t lane, std::int64_t pair) {
    if (!kHasTiles) return lane * kChunk + 2 * pair;
    return (pair / kTile * kBlock + lane) * 2 * kTile + pair % kTile * 2;
  }

  // What a part keeps of a block of lanes until the parts are put together.
  struct Kept {
    float* sums;     // [latent / 32][kBlock lanes][16 even elements, 16 odd ones]
    float* largest;  // [kBlock], of scores
    float* shares;   // [kBlock], their sum
  };
  std::int64_t kept_floats() const { return kBlock * (shape_.latent + 2); }
  Kept kept(std::int64_t group, std::int64_t part, std::int64_t block) const {
    float* sums = partial_ + first_[group] +
                  (part * lanes_.blocks(group) + block) * kept_floats();
    return {sums, sums + kBlock * shape_.latent, sums + kBlock * (shape_.latent + 1)};
  }

  // ---- queries -----------------------------------------------------------------------------------

  // 32 elements of a block's queries; lanes that nobody uses are 0.
  void pack(std::int64_t block, std::int64_t step) const {
    std::int64_t group = 0;
    while (lanes_.first(group + 1) <= block) ++group;
    const std::int64_t lane = (block - lanes_.first(group)) * kBlock;
    const std::int64_t lanes = std::min<std::int64_t>(kBlock, lanes_.count(group) - lane);
    std::uint16_t* to = packed_ + (block * shape_.size() / 2 + step * kTile) * kRow;
    if (lanes < kBlock) std::memset(to, 0, kTile * kRowBytes);
    // The lanes of a group are [requests][heads], as the queries are.
    const std::uint16_t* from = queries_ +
                                (parts_.request(group) * shape_.heads + lane) * shape_.size() +
                                step * 2 * kTile;
    for (std::int64_t i = 0; i < lanes; ++i, from += shape_.size()) {
      for (std::int64_t pair = 0; pair < kTile; ++pair) {
        std::memcpy(to + pair * kRow + 2 * i, from + 2 * pair, 2 * sizeof(std::uint16_t));
      }
    }
  }

  // ---- parts -------------------------------------------------------------------------------------

  void attend(std::int64_t unit) {
    const std::int64_t group = parts_.group(unit), part = unit - parts_.unit(group, 0, 0);
    const std::int64_t begin = parts_.begin(unit);
    const std::int64_t end = std::min(parts_.end(unit), parts_.length(group));
    std::uint16_t* latents = own_latents(shape_);
    const OwnScores own;
    for (std::int64_t token = begin; token < end; token += kChunk) {
      const LatentChunk some = chunks_.at(group, token, begin, end);
      chunks_.pack(some, latents);
      const std::int64_t spoilt = chunks_.drop_not_finite(some, latents);
      for (std::int64_t block = 0; block < lanes_.blocks(group); ++block) {
        const std::int64_t lane = block * kBlock;
        const std::int64_t lanes = std::min<std::int64_t>(kBlock, lanes_.count(group) - lane);
        const Kept to = kept(group, part, block);
        score(some, lanes_.first(group) + block, lanes, own.scores);
        for (std::int64_t at = 0; at < lanes; at += kTile) {
          soften(some, lane + at, at, std::min<std::int64_t>(kTile, lanes - at), own, to);
        }
        if (spoilt < some.tokens) spoil(some, spoilt, lane, lanes, to);
        add_values(some, lanes, latents, own.shares, to.sums);
      }
    }
  }

  void score(const LatentChunk& chunk, std::int64_t block, std::int64_t lanes, float* scores) const {
    const std::int64_t size = shape_.size(), stride = cache_.token_stride;
    const std::uint16_t* queries = packed_ + block * size / 2 * kRow;
    if constexpr (kHasTiles) {
      for (std::int64_t tile = 0; tile < chunk.count(); tile += 2, scores += 2 * kTile * kBlock) {
        const std::uint16_t *first = chunk.tiles[tile], *second = chunk.tiles[tile + 1];
        const bool has_second = tile + 1 < chunk.count();
        const auto kernel =
            lanes > kTile
                ? (has_second ? score_latents<true, true> : score_latents<false, true>)
                : (has_second ? score_latents<true, false> : score_latents<false, false>);
        kernel(first, second, stride, queries, size, scores);
      }
    } else {
      for (std::int64_t token = 0, here; token < chunk.tokens; token += here) {
        const std::int64_t of_tile = token % kTile;
        here = std::min({std::int64_t{kGroup}, kTile - of_tile, chunk.tokens - token});
        const std::uint16_t* tokens = chunk.tiles[token / kTile] + of_tile * stride;
        float* to = scores + token * kBlock;
        if (lanes > kTile) {
          kAddRows[here - 1](tokens, stride, queries, size / 2, true, {}, to);
        } else {
          kScoreLeft[here - 1](tokens, stride, queries, size, to);
        }
      }
    }
  }

  // Scores of up to 16 lanes become shares; `lane` is the first of them among its group's, `at` in its
  // block.
  void soften(const LatentChunk& chunk, std::int64_t lane, std::int64_t at, std::int64_t lanes,
              const OwnScores& own, const Kept& to) const {
    const Floats scale = spread(scale_ * kLog2E);
    const Floats before = chunk.is_first ? spread(kHidden) : load_floats(to.largest + at);
    float* scores = own.scores + at;
    // Requests of a group become longer; the first of these lanes is of the shortest.
    const std::int64_t request = parts_.request(chunk.group) + lane / shape_.heads;
    const std::int64_t seen_by_all = requests_.lengths[request] - chunk.begin;
    Floats most = before;
    for (std::int64_t token = 0; token < chunk.tokens; ++token) {
      Floats scaled = times(load_floats(scores + token * kBlock), scale);
      if (token >= seen_by_all) scaled = without_short(scaled, chunk, lane, token);
      store_floats(scores + token * kBlock, scaled);
      most = larger_of_first(most, scaled, kLanes);
    }
    store_floats(to.largest + at, most);
    const std::int64_t pairs = (chunk.tokens + kSpan - 1) / kSpan * kTile;
    // Lanes that see nothing of a chunk: what is hidden from them leaves 0 there too.
    const Floats from = larger_of_first(spread(kHidden / 2), most, kLanes);
    Floats sum = zeros();
    for (std::int64_t pair = 0; pair < pairs; ++pair) {
      Floats of[2];
      for (int i = 0; i < 2; ++i) {
        const std::int64_t token = 2 * pair + i;
        of[i] = token < chunk.tokens
                    ? power_of_two(minus(load_floats(scores + token * kBlock), from))
                    : zeros();
        sum = plus(sum, of[i]);
      }
      // As vLLM's kernel multiplies them, in bf16.
      store_pairs(own.pairs + pair * 2 * kTile, rounded_pairs(of[0], of[1]));
    }
    for (std::int64_t i = 0; i < lanes; ++i) {
      for (std::int64_t pair = 0; pair < pairs; ++pair) {
        std::memcpy(own.shares + shares_at(at + i, pair), own.pairs + (pair * kTile + i) * 2,
                    2 * sizeof(std::uint16_t));
      }
    }
    if (chunk.is_first) {
      store_floats(to.shares + at, sum);
      return;
    }
    const Floats kept = power_of_two(minus(before, most));
    store_floats(to.shares + at, times_plus(load_floats(to.shares + at), kept, sum));
    float of_lane[kLanes];
    store_floats(of_lane, kept);
    for (std::int64_t i = 0; i < lanes; ++i) {
      if (of_lane[i] != 1) scale_sums(to.sums + (at + i) * kBlock, of_lane[i]);
    }
  }

  // Scores that leave nothing of a token to lanes whose requests do not see it.
  Floats without_short(Floats scores, const LatentChunk& chunk, std::int64_t lane,
                       std::int64_t token) const {
    float all[kLanes];
    store_floats(all, scores);
    const std::int64_t count = lanes_.count(chunk.group);
    for (std::int64_t i = 0; i < std::min<std::int64_t>(kLanes, count - lane); ++i) {
      const std::int64_t request = parts_.request(chunk.group) + (lane + i) / shape_.heads;
      if (chunk.begin + token >= requests_.lengths[request]) all[i] = kHidden;
    }
    return load_floats(all);
  }

  // Make NaN what lanes become that see a token which was dropped.
  void spoil(const LatentChunk& chunk, std::int64_t token, std::int64_t lane, std::int64_t lanes,
             const Kept& to) const {
    for (std::int64_t i = 0; i < lanes; ++i) {
      const std::int64_t request = parts_.request(chunk.group) + (lane + i) / shape_.heads;
      if (chunk.begin + token >= requests_.lengths[request]) continue;
      to.shares[i] = std::numeric_limits<float>::quiet_NaN();
    }
  }

  void scale_sums(float* sums, float by) const {
    for (std::int64_t i = 0; i < shape_.latent; i += kBlock, sums += kBlock * kBlock) {
      for (std::int64_t half = 0; half < kBlock; half += kLanes) {
        store_floats(sums + half, times(load_floats(sums + half), spread(by)));
      }
    }
  }

  void add_values(const LatentChunk& chunk, std::int64_t lanes, const std::uint16_t* latents,
                  const std::uint16_t* shares, float* sums) const {
    for (std::int64_t i = 0; i < shape_.latent; i += kBlock) {
      if constexpr (kHasTiles) {
        const std::int64_t rows = (chunk.tokens + kSpan - 1) / kSpan * kTile;
        (lanes > kTile ? add_group<true> : add_group<false>)(
            shares, kBlock * 2 * kTile, latents, rows, chunk.is_first, nullptr, 0, sums);
      } else {
        const std::int64_t rows = (chunk.tokens + 1) / 2;
        for (std::int64_t lane = 0; lane < lanes; lane += kGroup) {
          const auto some = std::min<std::int64_t>(kGroup, lanes - lane);
          kAddRows[some - 1](shares + lane * kChunk, kChunk, latents, rows, chunk.is_first,
                             {}, sums + lane * kBlock);
        }
      }
      latents += kChunkPairs * kRow;
      sums += kBlock * kBlock;
    }
  }

  // ---- results -----------------------------------------------------------------------------------

  void finish_head(std::int64_t request, std::int64_t head) const {
    const std::int64_t group = lanes_.group(request), lane = lanes_.lane(request, head);
    const std::int64_t parts = parts_.of(group), at = lane % kBlock;
    const auto of_part = [&](std::int64_t part) { return kept(group, part, lane / kBlock); };
    float largest = of_part(0).largest[at], sum = 0;
    for (std::int64_t part = 1; part < parts; ++part) {
      largest = std::max(largest, of_part(part).largest[at]);
    }
    float weights[kMostParts];
    for (std::int64_t part = 0; part < parts; ++part) {
      const Kept from = of_part(part);
      weights[part] = std::exp2(from.largest[at] - largest);
      sum += weights[part] * from.shares[at];
    }
    const Floats share = spread(1.0f / sum);
    std::uint16_t* to = attended_ + head * requests_.m * shape_.latent;
    for (std::int64_t i = 0; i < shape_.latent; i += kBlock) {
      Floats even = zeros(), odd = zeros();
      for (std::int64_t part = 0; part < parts; ++part) {
        const float* from = of_part(part).sums + (i + at) * kBlock;
        const Floats weight = spread(weights[part]);
        even = times_plus(load_floats(from), weight, even);
        odd = times_plus(load_floats(from + kLanes), weight, odd);
      }
      store_in_turns(to + place_among(request, requests_.m, shape_.latent, i), times(even, share),
                     times(odd, share));
    }
  }

  const LatentHeads& shape_;
  const float scale_;
  const LatentCache& cache_;
  const Requests& requests_;
  const Parts& parts_;
  const LatentLanes lanes_;
  const LatentChunks chunks_;
  const std::uint16_t* queries_;
  std::uint16_t* attended_;
  std::uint16_t* packed_;  // queries [blocks of lanes][size / 2][32][2]
  WorkQueue queue_;
  std::vector<std::int64_t> first_;  // floats before those of each group's parts
  float* partial_;
};

}  // namespace ray_hetero::RAY_HETERO_LEVEL

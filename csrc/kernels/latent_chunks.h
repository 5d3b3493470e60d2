// Cached latents of neighbouring tokens, and how they are packed like a weight.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "latent_lanes.h"
#include "layers.h"
#include "read_ahead.h"
#include "work_queue.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

constexpr std::int64_t kChunkPairs = kChunk / 2;

// Neighbouring tokens of a group's requests.
struct LatentChunk {
  std::int64_t group, begin, tokens;
  bool is_first;  // of its part
  // Of each 16 of them, and where the part goes on, of the next 16.
  const std::uint16_t* tiles[kChunk / kTile + 1];

  std::int64_t count() const { return (tokens + kTile - 1) / kTile; }
};

// The chunks that the requests of a step have in a layer's cache.
class LatentChunks {
 public:
  LatentChunks(const LatentHeads& shape, const LatentCache& cache, const Requests& requests,
               const Parts& parts)
      : shape_(shape), cache_(cache), requests_(requests), parts_(parts) {}

  // `first` and `end` are where their part begins and ends.
  LatentChunk at(std::int64_t group, std::int64_t begin, std::int64_t first,
                 std::int64_t end) const {
    LatentChunk made{group, begin, std::min(kChunk, end - begin), begin == first, {}};
    // The last request has all blocks.
    const std::int64_t last = parts_.request(group) + parts_.rows(group) - 1;
    const std::int32_t* blocks = requests_.blocks + last * requests_.most_blocks;
    const std::int64_t behind = begin + (kChunk / kTile + 1) * kTile;
    int tile = 0;
    for (std::int64_t token = begin; token < std::min(end, behind); token += kTile) {
      const std::int64_t block = blocks[token / requests_.block];
      made.tiles[tile++] = cache_.data + block * cache_.block_stride +
                           token % requests_.block * cache_.token_stride;
    }
    return made;
  }

  // Pairs of tokens as rows of a weight, with zeros up to a multiple of 32 tokens; of 32 elements the
  // even ones are left, the odd ones right.  What lies behind a request's last token is somebody
  // else's, or nobody's: it may be NaN, and must not be multiplied, not even with 0.
  void pack(const LatentChunk& chunk, std::uint16_t* to) const {
    const std::int64_t tiles = (chunk.tokens + kSpan - 1) / kSpan * 2;
    const std::int64_t step = kTile / 2 * kRow;
    for (std::int64_t tile = 0; tile < tiles; ++tile, to += step) {
      const std::int64_t tokens = std::clamp<std::int64_t>(chunk.tokens - tile * kTile, 0, kTile);
      const std::uint16_t *from = chunk.tiles[tile], *next = chunk.tiles[tile + 1];
      for (std::int64_t i = 0; i < shape_.latent; i += kBlock) {
        pack_tile(tokens > 0 ? from + i : nullptr, tokens, to + i / kBlock * kChunkPairs * kRow);
        if (next != nullptr) prefetch(next + i);
      }
      if (next != nullptr) prefetch_rotated(next + shape_.latent);
    }
  }

  // Make packed tokens 0 that some requests of the group do not see, and whose latents are not
  // finite: all lanes of a block multiply them.  Returns the first of them; all of the chunk's
  // tokens if there is none.
  std::int64_t drop_not_finite(const LatentChunk& chunk, std::uint16_t* packed) const {
    const std::int64_t seen = requests_.lengths[parts_.request(chunk.group)] - chunk.begin;
    std::int64_t found = chunk.tokens;
    for (std::int64_t token = chunk.tokens - 1; token >= std::max<std::int64_t>(seen, 0); --token) {
      if (is_finite(chunk.tiles[token / kTile] + token % kTile * cache_.token_stride)) continue;
      found = token;
      for (std::int64_t i = 0; i < shape_.latent; i += kBlock) {
        std::uint16_t* row = packed + (i / kBlock * kChunkPairs + token / 2) * kRow;
        for (std::int64_t at = token % 2; at < kRow; at += 2) row[at] = 0;
      }
    }
    return found;
  }

 private:
  bool is_finite(const std::uint16_t* latent) const {
    Floats left = zeros();
    for (std::int64_t i = 0; i < shape_.latent; i += kTile) {
      const Floats here = load_bf16(latent + i);
      left = plus(left, minus(here, here));
    }
    return sum_of(left) == 0;
  }

  // 32 elements of 16 tokens.
  void pack_tile(const std::uint16_t* from, std::int64_t tokens, std::uint16_t* to) const {
    const std::int64_t pairs = tokens / 2;
    for (std::int64_t pair = 0; pair < pairs; ++pair, from += 2 * cache_.token_stride, to += kRow) {
      const Pairs first = load_pairs(from), second = load_pairs(from + cache_.token_stride);
      store_pairs(to, exact_pairs(firsts(first), firsts(second)));
      store_pairs(to + kBlock, exact_pairs(seconds(first), seconds(second)));
    }
    if (tokens % 2 != 0) {
      const Pairs last = load_pairs(from);
      store_pairs(to, exact_pairs(firsts(last), zeros()));
      store_pairs(to + kBlock, exact_pairs(seconds(last), zeros()));
      to += kRow;
    }
    std::memset(to, 0, (kTile / 2 - (tokens + 1) / 2) * kRowBytes);
  }

  // 32 elements of 16 tokens.
  RAY_HETERO_PREFETCH void prefetch(const std::uint16_t* at) const {
    for (int token = 0; token < kTile; ++token, at += cache_.token_stride) prefetch_l2(at);
  }
  RAY_HETERO_PREFETCH void prefetch_rotated(const std::uint16_t* at) const {
    for (std::int64_t i = 0; i < shape_.rotated; i += kBlock) prefetch(at + i);
  }

  const LatentHeads& shape_;
  const LatentCache& cache_;
  const Requests& requests_;
  const Parts& parts_;
};

}  // namespace ray_hetero::RAY_HETERO_LEVEL

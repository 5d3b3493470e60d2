// How the attention of a step is shared out: requests in parts, and parts by heads.

#pragma once

#include "layers.h"
#include "sizes.h"

#include <cstdint>
#include <vector>

namespace ray_hetero {

// The units of a step, the same for all layers with the same blocks and window.
class Parts {
 public:
  Parts(const Requests& requests, std::int64_t kv_heads, std::int64_t window)
      : kv_heads_(kv_heads), first_(requests.m + 1) {
    for (std::int64_t request = 0; request < requests.m; ++request) {
      const std::int64_t length = requests.lengths[request];
      seen_.push_back(length > window ? length - window : 0);
      begin_.push_back(seen_.back() / kSpan * kSpan);
      const std::int64_t chunks = (length - begin_.back() + kChunk - 1) / kChunk;
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
    return begin_[of] + (unit / kv_heads_ - first_[of]) * tokens_[of];
  }
  // The first token of a request that is attended to: in the first of its spans, of which the tokens
  // before it are none.
  std::int64_t seen(std::int64_t request) const { return seen_[request]; }
  std::int64_t end(std::int64_t unit) const { return begin(unit) + tokens_[request(unit)]; }
  std::int64_t unit(std::int64_t request, std::int64_t head, std::int64_t part) const {
    return (first_[request] + part) * kv_heads_ + head;
  }

 private:
  std::int64_t kv_heads_;
  std::vector<std::int64_t> first_;     // part of each request
  std::vector<std::int64_t> requests_;  // of each part
  std::vector<std::int64_t> tokens_;    // of a part of each request
  std::vector<std::int64_t> seen_;      // of each request, the first token that is attended to
  std::vector<std::int64_t> begin_;     // and the first of its span
};

}  // namespace ray_hetero

// How the attention of a step is shared out: requests in groups that read the same keys and
// values, groups in parts, and parts by heads.

#pragma once

#include "layers.h"
#include "sizes.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace ray_hetero {

// Whether two requests of one token each are neighbours in one conversation, as the tokens are of a
// request that verifies drafts: the second sees what the first sees, and itself.
inline bool are_neighbours(const Requests& requests, std::int64_t first, std::int64_t second) {
  const std::int64_t block = requests.block, before = requests.lengths[first];
  if (requests.lengths[second] != before + 1) return false;
  const std::int32_t* left = requests.blocks + first * requests.most_blocks;
  const std::int32_t* right = requests.blocks + second * requests.most_blocks;
  const std::int64_t used = (before + block - 1) / block;
  // The one before attends to nothing that stands where the second is to be, but reads it: it must
  // be written in this step.
  return requests.slots[second] == right[before / block] * block + before % block &&
         std::memcmp(left, right, used * sizeof(std::int32_t)) == 0;
}

// The units of a step, the same for all layers with the same blocks and window.  A unit reads its keys and values once, for all
// requests of its group.
class Parts {
 public:
  // `most` parts of a request; of many requests each needs fewer.
  Parts(const Requests& requests, std::int64_t kv_heads, std::int64_t window)
      : Parts(requests, kv_heads, window,
              // All parts together need no more memory than those of few requests.
              kMostParts * kFewTokens / std::max(requests.m, kFewTokens)) {}
  Parts(const Requests& requests, std::int64_t kv_heads, std::int64_t window, std::int64_t most)
      : kv_heads_(kv_heads), window_(window), most_(most), requests_(requests.m), first_{0},
        rows_before_{0} {
    for (std::int64_t begin = 0, end; begin < requests.m; begin = end) {
      end = begin + 1;
      while (end < requests.m && requests.lengths[begin] >= kTogetherTokens &&
             are_neighbours(requests, end - 1, end)) {
        ++end;
      }
      add(begin, end - begin, requests.lengths[begin], requests.lengths[end - 1]);
    }
    are_apart_ = !has_shared() && are_apart(requests);
  }

  std::int64_t units() const { return first_.back() * kv_heads_; }
  std::int64_t groups() const { return static_cast<std::int64_t>(groups_.size()); }
  bool has_shared() const { return groups() < requests_; }
  // Whether no request reads a block that another one writes to in this step.  Those that share
  // blocks do so where one verifies drafts, or comes while the other one fills its block.
  bool are_apart() const { return are_apart_; }
  // Whether a unit has the last of its group's tokens.
  bool is_last(std::int64_t unit) const { return end(unit) >= length(group(unit)); }

  // Of a group: its first request, how many it has, tokens of the last, which has the most, and
  // parts.
  std::int64_t request(std::int64_t group) const { return groups_[group].request; }
  std::int64_t rows(std::int64_t group) const { return groups_[group].rows; }
  std::int64_t length(std::int64_t group) const { return groups_[group].length; }
  std::int64_t of(std::int64_t group) const { return first_[group + 1] - first_[group]; }

  std::int64_t group(std::int64_t unit) const { return group_of_[unit / kv_heads_]; }
  std::int64_t head(std::int64_t unit) const { return unit % kv_heads_; }
  // The first of a unit's tokens, and behind the last if the requests were longer.
  std::int64_t begin(std::int64_t unit) const {
    const std::int64_t of = group(unit);
    return groups_[of].begin + (unit / kv_heads_ - first_[of]) * groups_[of].tokens;
  }
  std::int64_t end(std::int64_t unit) const { return begin(unit) + groups_[group(unit)].tokens; }
  std::int64_t unit(std::int64_t group, std::int64_t head, std::int64_t part) const {
    return (first_[group] + part) * kv_heads_ + head;
  }

  // The first token that a request of some tokens attends to.  Units of its group begin with the span
  // of the first such token of all of them; of this span some tokens may be hidden from it.
  std::int64_t seen(std::int64_t length) const { return length > window_ ? length - window_ : 0; }

  // Requests of all units before one, and of all.
  std::int64_t rows_before(std::int64_t unit) const {
    const std::int64_t of = group(unit);
    return rows_before_[of] + (unit - first_[of] * kv_heads_) * groups_[of].rows;
  }
  std::int64_t all_rows() const { return rows_before_.back(); }

 private:
  struct Group {
    std::int64_t request, rows, begin, length, tokens;  // the last: of a part
  };

  bool are_apart(const Requests& requests) const {
    std::vector<std::int64_t> written;
    for (std::int64_t i = 0; i < requests.m; ++i) {
      if (requests.slots[i] >= 0) written.push_back(requests.slots[i] / requests.block);
    }
    std::sort(written.begin(), written.end());
    for (std::int64_t i = 0; i < requests.m; ++i) {
      const std::int64_t length = requests.lengths[i];
      const std::int32_t* blocks = requests.blocks + i * requests.most_blocks;
      for (std::int64_t at = seen(length) / requests.block; at * requests.block < length; ++at) {
        const auto [first, last] = std::equal_range(written.begin(), written.end(), blocks[at]);
        const std::int64_t slot = requests.slots[i];
        const bool is_own = slot >= 0 && slot / requests.block == blocks[at];
        if (last - first > (is_own ? 1 : 0)) return false;
      }
    }
    return true;
  }

  // `shortest` and `length` are tokens of its first and of its last request.
  void add(std::int64_t request, std::int64_t rows, std::int64_t shortest, std::int64_t length) {
    const std::int64_t begin = seen(shortest) / kSpan * kSpan;
    const std::int64_t chunks = (length - begin + kChunk - 1) / kChunk;
    const std::int64_t of_part = (chunks + most_ - 1) / most_;
    const std::int64_t parts = (chunks + of_part - 1) / of_part;
    group_of_.insert(group_of_.end(), parts, groups());
    groups_.push_back({request, rows, begin, length, of_part * kChunk});
    first_.push_back(first_.back() + parts);
    rows_before_.push_back(rows_before_.back() + parts * kv_heads_ * rows);
  }

  std::int64_t kv_heads_, window_, most_, requests_;
  bool are_apart_;
  std::vector<Group> groups_;
  std::vector<std::int64_t> group_of_;     // of each part
  std::vector<std::int64_t> first_;        // part of each group
  std::vector<std::int64_t> rows_before_;  // of the units of the groups before each
};

}  // namespace ray_hetero

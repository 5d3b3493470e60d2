// Where the queries of a step lie for attention over latents, in which all heads attend to the same
// keys.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "attention_parts.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

// Where the queries of a step are: a lane for each head of each request, 32 lanes a block.  The
// requests of a group have neighbouring lanes; each group begins a block.
class LatentLanes {
 public:
  LatentLanes(const Parts& parts, std::int64_t heads) : heads_(heads), first_{0} {
    for (std::int64_t group = 0; group < parts.groups(); ++group) {
      const std::int64_t rows = parts.rows(group);
      for (std::int64_t row = 0; row < rows; ++row) of_.push_back({group, row * heads});
      counts_.push_back(rows * heads);
      first_.push_back(first_.back() + (rows * heads + kBlock - 1) / kBlock);
    }
  }

  std::int64_t all_blocks() const { return first_.back(); }
  // Of a group: its first block, how many it has, and its lanes.
  std::int64_t first(std::int64_t group) const { return first_[group]; }
  std::int64_t blocks(std::int64_t group) const { return first_[group + 1] - first_[group]; }
  std::int64_t count(std::int64_t group) const { return counts_[group]; }

  std::int64_t group(std::int64_t request) const { return of_[request].group; }
  // Among those of its group.
  std::int64_t lane(std::int64_t request, std::int64_t head) const {
    return of_[request].lane + head;
  }

 private:
  struct Of {
    std::int64_t group, lane;
  };
  std::int64_t heads_;
  std::vector<Of> of_;  // each request
  std::vector<std::int64_t> counts_, first_;
};

}  // namespace ray_hetero::RAY_HETERO_LEVEL

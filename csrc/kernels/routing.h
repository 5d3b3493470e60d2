// Which tokens go to which expert of a layer.

#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace ray_hetero {

// What a token and one of the experts chosen for it have in common is a place.  Places of an expert
// are neighbours, in the order of their tokens; experts that no token chose have none.
class Routing {
 public:
  // ids [m][chosen], in row order; negative ones are experts that are not here.
  // Throws std::invalid_argument: an expert that there is not.
  Routing(const std::int32_t* ids, std::int64_t m, std::int64_t chosen, std::int64_t experts)
      : chosen_(chosen), place_(m * chosen, -1) {
    std::vector<std::int64_t> next(experts + 1);  // of each expert, one further
    for (std::int64_t i = 0; i < m * chosen; ++i) {
      if (ids[i] >= experts) {
        throw std::invalid_argument("expected experts below " + std::to_string(experts) +
                                    ", got " + std::to_string(ids[i]));
      }
      if (ids[i] >= 0) ++next[ids[i] + 1];
    }
    for (std::int64_t expert = 0; expert < experts; ++expert) {
      const std::int64_t tokens = next[expert + 1];
      next[expert + 1] += next[expert];
      if (tokens == 0) continue;
      expert_.push_back(expert);
      first_.push_back(next[expert]);
      most_ = std::max(most_, tokens);
    }
    first_.push_back(next[experts]);
    token_.resize(places());
    for (std::int64_t i = 0; i < m * chosen; ++i) {
      if (ids[i] < 0) continue;
      place_[i] = next[ids[i]]++;
      token_[place_[i]] = i / chosen;
    }
  }

  // Experts that are used, in ascending order; the others here take a number among these.
  std::int64_t active() const { return static_cast<std::int64_t>(expert_.size()); }
  std::int64_t expert(std::int64_t number) const { return expert_[number]; }
  std::int64_t first(std::int64_t number) const { return first_[number]; }
  std::int64_t tokens(std::int64_t number) const { return first_[number + 1] - first_[number]; }
  // Most tokens of an expert.
  std::int64_t most() const { return most_; }

  std::int64_t places() const { return first_.back(); }
  std::int64_t chosen() const { return chosen_; }
  std::int64_t token(std::int64_t place) const { return token_[place]; }
  // Of a token's expert that was chosen as number i, or -1.
  std::int64_t place(std::int64_t token, std::int64_t i) const {
    return place_[token * chosen_ + i];
  }

 private:
  const std::int64_t chosen_;
  std::vector<std::int64_t> place_, token_, expert_, first_;
  std::int64_t most_ = 0;
};

}  // namespace ray_hetero

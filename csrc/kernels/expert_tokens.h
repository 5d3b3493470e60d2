// Where the tokens of an expert lie.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "routing.h"
#include "tokens.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

// Vectors of bf16 of an expert's tokens: groups of 32, which lie one behind the other.
struct ExpertTokens {
  const std::uint16_t* data;
  std::int64_t count, k;

  std::int64_t groups() const { return (count + kFewTokens - 1) / kFewTokens; }
  std::int64_t tokens(std::int64_t group) const {
    return std::min(kFewTokens, count - group * kFewTokens);
  }
  const std::uint16_t* group(std::int64_t group) const { return data + group * kFewTokens * k; }
  Places places(std::int64_t group) const { return {tokens(group), k, kHasTiles}; }
};

// Of an element i, one of 16 neighbours, of an expert's token: where it is behind its first one's.
inline std::int64_t place_among(std::int64_t token, std::int64_t count, std::int64_t k,
                                std::int64_t i) {
  const std::int64_t group = token / kFewTokens;
  const Places places{std::min(kFewTokens, count - group * kFewTokens), k, kHasTiles};
  return group * kFewTokens * k + places.at(token % kFewTokens, i);
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

// A channel between a sender of tokens and an expert rank, as the expert rank has it.

#pragma once

#include "../expert_call.h"
#include "shadow.h"
#include "slot_orders.h"
#include "words.h"

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace ray_hetero {

// Far more than any model has: what is counted by them stays small whatever another process writes.
constexpr std::size_t kMostExperts = 1 << 16;

struct Layer {
  ComputeExperts compute;  // null where Python computes
  const void* context;
  std::int64_t hidden, chosen;
  std::int64_t experts;  // 0 where it is not known, and nothing is counted
};

// What one sender and this expert rank share.
struct Channel {
  Words words;
  std::int64_t rank;  // this one's number among the expert ranks
  int connection;     // a socket that the system closes when the sender ends
  const std::uint8_t* x;
  const std::int32_t* ids;
  const float* weights;
  std::uint8_t* y;
  std::int64_t capacity;  // tokens
  std::vector<Layer> layers;
  std::vector<LayerSlots> slots;  // of each layer
  std::int64_t first = 0;         // number of its first layer among those of all channels
  // Of the GPU's slots: the turn that the books are of, how many there are, and what was counted.
  std::uint32_t turn = 0, count = 0;
  SlotSums sums{};
  // The layer that was counted last; the first one that may give orders in this step; and the one
  // that may be the first in the next step, for lack of room in this one, or -1.
  std::int64_t last = 0, from = 0, refused = -1;

  // What another process asks for is compared with `capacity` and the layers alone, so there must be
  // memory for these: of x and y so many elements, of ids and weights so many routes.
  // Throws std::invalid_argument.
  void check(std::int64_t ranks, std::int64_t elements, std::int64_t routes) const {
    const auto text = [](auto number) { return std::to_string(number); };
    if (rank < 0 || rank >= ranks) {
      throw std::invalid_argument("expected one of " + text(ranks) + " expert ranks, got " +
                                  text(rank));
    }
    if (capacity < 1 || capacity >= static_cast<std::int64_t>(kTokens) || layers.size() > kLayers) {
      throw std::invalid_argument("expected 1 to " + text(kTokens - 1) + " tokens and at most " +
                                  text(kLayers) + " layers, got " + text(capacity) + " and " +
                                  text(layers.size()));
    }
    for (const Layer& layer : layers) {
      if (layer.hidden < 1 || layer.hidden > elements / capacity || layer.chosen < 1 ||
          layer.chosen > routes / capacity) {
        throw std::invalid_argument(
            "expected memory for " + text(capacity) + " tokens of " + text(layer.hidden) +
            " elements and " + text(layer.chosen) + " experts, got " + text(elements) +
            " elements and " + text(routes) + " experts");
      }
      if (layer.experts < 0 || layer.experts > static_cast<std::int64_t>(kMostExperts)) {
        throw std::invalid_argument("expected at most " + text(kMostExperts) +
                                    " experts of a layer, got " + text(layer.experts));
      }
    }
  }
};

}  // namespace ray_hetero

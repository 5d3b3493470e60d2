// The words of a channel, as the sender of tokens uses them.

#pragma once

#include "slot_orders.h"
#include "words.h"

#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ray_hetero {

// The word that asks for a layer of so many tokens.  Throws std::invalid_argument.
inline std::uint32_t request_of(std::int64_t layer, std::int64_t tokens) {
  if (layer < 0 || layer >= static_cast<std::int64_t>(kLayers) || tokens <= 0 ||
      tokens >= static_cast<std::int64_t>(kTokens)) {
    throw std::invalid_argument("expected a layer below " + std::to_string(kLayers) +
                                " and 1 to " + std::to_string(kTokens - 1) + " tokens, got layer " +
                                std::to_string(layer) + " and " + std::to_string(tokens) +
                                " tokens");
  }
  return static_cast<std::uint32_t>(tokens) << kLayerBits | static_cast<std::uint32_t>(layer + 1);
}

// A sender that waits in its own thread; one on a GPU has the GPU write and wait for the words.
class Sender {
 public:
  explicit Sender(const Words& words) : words_(words), orders_(words) {}

  void post(std::int64_t layer, std::int64_t tokens) {
    const std::uint32_t request = request_of(layer, tokens);
    for (std::int64_t rank = 0; rank < words_.ranks(); ++rank) {
      words_.request(rank).store(request, std::memory_order_release);
    }
  }

  // Say that every `every`-th row of the steps that follow is no draft; 0 for none that is known.
  void mark(std::uint32_t every) { words_.every().store(every, std::memory_order_release); }

  // What is said about slots, see there.
  SlotOrders& orders() { return orders_; }

  // Whether all have answered; not when the channel has failed, which ends the wait.
  bool wait() {
    patience_.renew();
    for (std::int64_t rank = 0; rank < words_.ranks(); ++rank) {
      while (words_.answer(rank).load(std::memory_order_acquire) == 0) patience_.wait();
    }
    for (std::int64_t rank = 0; rank < words_.ranks(); ++rank) {
      words_.answer(rank).store(0, std::memory_order_relaxed);
    }
    return words_.failed().load(std::memory_order_acquire) == 0;
  }

  // Expert ranks that have not taken back their request, each with the answers it has given.
  std::vector<std::pair<std::int64_t, std::uint32_t>> owing() const {
    std::vector<std::pair<std::int64_t, std::uint32_t>> found;
    for (std::int64_t rank = 0; rank < words_.ranks(); ++rank) {
      const std::uint32_t count = words_.count(rank).load(std::memory_order_acquire);
      if (words_.request(rank).load(std::memory_order_acquire) != 0) found.push_back({rank, count});
    }
    return found;
  }

  // What a host function in a CUDA stream calls, with what; valid as long as this.
  std::pair<std::uintptr_t, std::uintptr_t> posting(std::int64_t layer, std::int64_t tokens) {
    posts_.push_back({this, layer, tokens});
    return {reinterpret_cast<std::uintptr_t>(+[](void* given) {
              const Post& post = *static_cast<const Post*>(given);
              post.sender->post(post.layer, post.tokens);
            }),
            reinterpret_cast<std::uintptr_t>(&posts_.back())};
  }
  std::pair<std::uintptr_t, std::uintptr_t> waiting() {
    return {reinterpret_cast<std::uintptr_t>(+[](void* given) {
              static_cast<Sender*>(given)->wait();
            }),
            reinterpret_cast<std::uintptr_t>(this)};
  }

  // End every wait, from any thread; again and again, as a GPU takes answers back.
  void release() {
    words_.failed().store(1, std::memory_order_release);
    for (std::int64_t rank = 0; rank < words_.ranks(); ++rank) {
      words_.answer(rank).store(1, std::memory_order_release);
    }
  }
  bool has_failed() const { return words_.failed().load(std::memory_order_acquire) != 0; }

 private:
  struct Post {
    Sender* sender;
    std::int64_t layer, tokens;
  };

  Words words_;
  SlotOrders orders_;
  Patience patience_;  // of the one thread that waits
  std::deque<Post> posts_;
};

}  // namespace ray_hetero

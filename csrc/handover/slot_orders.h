// What a sender whose GPU has slots for experts and the first expert rank say to each other.
//
// The sender says how many slots each layer has, and whether it follows.  The expert rank keeps a
// book of these slots (shadow.h).  While the sender follows, each decision of the book is an order,
// and a decision that there is no room for is not made: so the sender's pace is the book's.  While
// it does not, the book goes on by itself, and says what slots would hold.

#pragma once

#include "words.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

namespace ray_hetero {

// Orders that wait to be taken, at most.
constexpr std::uint32_t kOrders = 16;

// Sums over the steps that are counted, as the book has them.
struct SlotSums {
  std::uint64_t steps = 0, layers = 0, computing_ns = 0, waiting_ns = 0, experts = 0, hits = 0,
                copies = 0;
};

class SlotOrders {
 public:
  using Order = std::array<std::int64_t, 3>;  // layer, expert, slot

  explicit SlotOrders(const Words& words) : memory_(words.slots()) {}

  // Of the sender: slots of each layer, 0 for none.
  void make(std::uint32_t slots) { word(0, 0).store(slots, std::memory_order_release); }
  std::uint32_t slots() const { return word(0, 0).load(std::memory_order_acquire); }

  // Of the sender: from now on take orders, of an empty book; or let the book go on by itself.
  void follow(bool is_following) {
    const std::uint32_t turn = this->turn();
    if (is_following != follows(turn)) word(0, 1).store(turn + 1, std::memory_order_release);
  }
  // Changes each time that the sender begins or ends to follow.
  std::uint32_t turn() const { return word(0, 1).load(std::memory_order_acquire); }
  static bool follows(std::uint32_t turn) { return turn % 2 != 0; }

  // Of the sender: the oldest orders, up to so many; those of an earlier turn are dropped.
  std::vector<Order> take(std::uint32_t most) {
    std::vector<Order> found;
    std::uint32_t at = word(1, 0).load(std::memory_order_relaxed);
    const std::uint32_t end = word(2, 0).load(std::memory_order_acquire);
    const std::uint16_t turn = static_cast<std::uint16_t>(this->turn());
    // What another process writes decides no more than how often this turns.
    for (std::uint32_t i = 0; i < kOrders && at != end && found.size() < most; ++i, ++at) {
      const std::uint64_t order = number(4, at % kOrders).load(std::memory_order_relaxed);
      if (part(order, 3) != turn) continue;
      found.push_back({part(order, 0), part(order, 1), part(order, 2)});
    }
    word(1, 0).store(at, std::memory_order_release);
    return found;
  }

  // Of the expert rank: whether there was room for an order.
  bool give(std::uint32_t turn, std::int64_t layer, std::int64_t expert, std::int64_t slot) {
    const std::uint32_t at = word(2, 0).load(std::memory_order_relaxed);
    if (at - word(1, 0).load(std::memory_order_acquire) >= kOrders) return false;
    const std::uint64_t order = placed(layer, 0) | placed(expert, 1) | placed(slot, 2) |
                                placed(static_cast<std::int64_t>(turn & 0xffff), 3);
    number(4, at % kOrders).store(order, std::memory_order_relaxed);
    word(2, 0).store(at + 1, std::memory_order_release);
    return true;
  }

  // Of the expert rank, for the sender to read; each number by itself.
  void tell(const SlotSums& sums) {
    const auto given = as_numbers(sums);
    for (std::size_t i = 0; i < given.size(); ++i) {
      number(3, i).store(given[i], std::memory_order_relaxed);
    }
  }
  std::array<std::uint64_t, 7> told() const {
    std::array<std::uint64_t, 7> found;
    for (std::size_t i = 0; i < found.size(); ++i) {
      found[i] = number(3, i).load(std::memory_order_relaxed);
    }
    return found;
  }

 private:
  using Number = std::atomic<std::uint64_t>;
  static_assert(Number::is_always_lock_free && sizeof(Number) == 8, "shared by processes");
  static_assert(kOrders * sizeof(Number) <= kWordBytes, "orders have one place");

  static std::array<std::uint64_t, 7> as_numbers(const SlotSums& sums) {
    return {sums.steps, sums.layers, sums.computing_ns, sums.waiting_ns, sums.experts, sums.hits,
            sums.copies};
  }
  static std::int64_t part(std::uint64_t order, int place) {
    return static_cast<std::int64_t>(order >> 16 * place & 0xffff);
  }
  static std::uint64_t placed(std::int64_t value, int place) {
    return static_cast<std::uint64_t>(value) << 16 * place;
  }
  // Each end writes places of its own.
  Word& word(std::int64_t place, std::int64_t index) const {
    return *reinterpret_cast<Word*>(memory_ + place * kWordBytes + index * 4);
  }
  Number& number(std::int64_t place, std::int64_t index) const {
    return *reinterpret_cast<Number*>(memory_ + place * kWordBytes + index * 8);
  }

  std::uint8_t* memory_;
};

}  // namespace ray_hetero

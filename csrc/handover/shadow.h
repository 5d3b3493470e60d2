// Books of slots for experts in the memory of a GPU: which experts they would hold, and how many of
// those that steps read they would have held.  There may be a GPU that has slots; of these there is
// a book too, whose decisions it is told (slot_orders.h).
//
// Each layer has slots of its own.  An expert that is missing is copied into the slot whose expert
// was used longest ago, behind the step, if the layer has used it twice within kWindow steps; a step
// copies at most kCopies experts of a layer, and replaces none that it has used itself.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace ray_hetero {

// What each number of slots holds, in hundredths of a layer's experts.
constexpr std::array<std::int64_t, 3> kSlotPercents{5, 10, 25};
constexpr std::size_t kSlotSizes = kSlotPercents.size();
// Books: of these sizes, and behind them of the slots that a GPU has.
constexpr std::size_t kBooks = kSlotSizes + 1;
// Steps within which the second use of an expert has it copied.
constexpr std::uint32_t kWindow = 32;
constexpr int kCopies = 2;
// Tokens of the largest step that is counted; a larger one uses nearly all experts, and would leave
// the slots alone.
constexpr std::int64_t kCountedTokens = 64;

// Slots of so many hundredths of a layer's experts, at least one.
inline std::int64_t slots_of(std::int64_t experts, std::int64_t percent) {
  const std::int64_t found = (experts * percent + 50) / 100;
  return found < 1 ? 1 : found;
}

// What steps have read, and what slots of each size have held of it.
struct SlotCounts {
  std::int64_t experts = 0;
  std::array<std::int64_t, kBooks> hits{}, copies{};
};

// The slots of one layer, of all sizes.
class LayerSlots {
 public:
  explicit LayerSlots(std::int64_t experts)
      : used_(static_cast<std::size_t>(experts), 0), in_(static_cast<std::size_t>(experts), 0) {
    for (std::size_t size = 0; size < kSlotSizes; ++size) {
      most_[size] = static_cast<std::size_t>(slots_of(experts, kSlotPercents[size]));
    }
  }

  std::int64_t experts() const { return static_cast<std::int64_t>(used_.size()); }

  // How many books there are.
  std::size_t books() const { return most_[kSlotSizes] == 0 ? kSlotSizes : kBooks; }

  // From now on a GPU has so many slots, all of them empty.
  void have(std::int64_t slots) {
    constexpr std::uint8_t bit = 1u << kSlotSizes;
    for (std::uint8_t& in : in_) in &= static_cast<std::uint8_t>(~bit);
    slots_[kSlotSizes].clear();
    most_[kSlotSizes] = static_cast<std::size_t>(slots < experts() ? slots : experts());
  }

  // Count a step that uses these experts, each given once.
  SlotCounts step(const std::vector<std::int32_t>& given) {
    return step(given, [](std::int32_t, std::size_t) { return true; });
  }

  // The same; `may_copy` is asked before an expert is copied into a slot of the GPU.
  template <typename MayCopy>
  SlotCounts step(const std::vector<std::int32_t>& given, const MayCopy& may_copy) {
    SlotCounts found;
    found.experts = static_cast<std::int64_t>(given.size());
    ++now_;
    again_.clear();
    for (const std::int32_t expert : given) {
      const std::uint8_t in = in_[expert];
      for (std::size_t size = 0; size < kBooks; ++size) found.hits[size] += in >> size & 1;
      const bool is_second = used_[expert] != 0 && now_ - used_[expert] <= kWindow;
      if (is_second && in != kEverywhere) again_.push_back(expert);
      used_[expert] = now_;
    }
    for (std::size_t size = 0; size < kBooks; ++size) {
      for (const std::int32_t expert : again_) {
        if ((in_[expert] >> size & 1) != 0) continue;
        if (found.copies[size] == kCopies) break;
        const std::size_t slot = slot_for_next(size);
        if (slot == most_[size] || (size == kSlotSizes && !may_copy(expert, slot))) break;
        copy(expert, size, slot);
        ++found.copies[size];
      }
    }
    return found;
  }

 private:
  static constexpr std::uint8_t kEverywhere = (1 << kBooks) - 1;

  // An empty slot, or that whose expert was used longest ago; none, which is as many as there are,
  // if this step has used all of them.
  std::size_t slot_for_next(std::size_t size) const {
    const std::vector<std::int32_t>& slots = slots_[size];
    if (slots.size() < most_[size]) return slots.size();
    std::size_t oldest = most_[size];
    std::uint32_t age = 0;
    for (std::size_t slot = 0; slot < slots.size(); ++slot) {
      const std::uint32_t its = now_ - used_[static_cast<std::size_t>(slots[slot])];
      if (its > age) oldest = slot, age = its;
    }
    return oldest;
  }

  void copy(std::int32_t expert, std::size_t size, std::size_t slot) {
    const std::uint8_t bit = static_cast<std::uint8_t>(1u << size);
    std::vector<std::int32_t>& slots = slots_[size];
    if (slot == slots.size()) {
      slots.push_back(expert);
    } else {
      in_[slots[slot]] &= static_cast<std::uint8_t>(~bit);
      slots[slot] = expert;
    }
    in_[expert] |= bit;
  }

  std::vector<std::uint32_t> used_;  // by expert: the step that has used it last, or 0
  std::vector<std::uint8_t> in_;     // by expert: a bit for each size whose slots hold it
  std::array<std::vector<std::int32_t>, kBooks> slots_;  // of each book: their experts
  std::array<std::size_t, kBooks> most_{};               // how many slots there are
  std::uint32_t now_ = 0;
  std::vector<std::int32_t> again_;  // of this step: second uses
};

}  // namespace ray_hetero

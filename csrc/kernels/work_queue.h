// The work of a call, cut into units and shared out among threads.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace ray_hetero {

// Neighbouring units that a thread has taken; none if there were none left.
struct Units {
  std::int64_t first = 0, count = 0;
};

// Units that one thread has still to do.  Its owner takes them from the front, others from the end.
class alignas(64) UnitRange {
 public:
  void set(std::uint64_t begin, std::uint64_t end) { range_ = begin << 32 | end; }
  Units left() const {
    const std::uint64_t range = range_.load(std::memory_order_relaxed);
    const auto begin = static_cast<std::int64_t>(range >> 32);
    return {begin, static_cast<std::int64_t>(range & 0xffffffff) - begin};
  }
  // One unit, or the `whole` of a group while there are enough of them left for others to take.
  Units take_first(std::uint64_t whole) {
    return take([whole](std::uint64_t begin, std::uint64_t end) {
      const bool is_whole = begin % whole == 0 && end - begin >= kGroupsLeft * whole;
      const std::uint64_t count = is_whole ? whole : 1;
      return Taken{begin + count, end, begin, count};
    });
  }
  Units take_last() {
    return take([](std::uint64_t begin, std::uint64_t end) {
      return Taken{begin, end - 1, end - 1, 1};
    });
  }

 private:
  static constexpr std::uint64_t kGroupsLeft = 3;
  struct Taken {
    std::uint64_t left_begin, left_end, first, count;
  };

  template <typename How>
  Units take(How how) {
    std::uint64_t range = range_.load(std::memory_order_relaxed);
    for (;;) {
      const std::uint64_t begin = range >> 32, end = range & 0xffffffff;
      if (begin >= end) return {};
      const Taken taken = how(begin, end);
      const std::uint64_t left = taken.left_begin << 32 | taken.left_end;
      if (range_.compare_exchange_weak(range, left, std::memory_order_relaxed)) {
        return {static_cast<std::int64_t>(taken.first), static_cast<std::int64_t>(taken.count)};
      }
    }
  }

  std::atomic<std::uint64_t> range_{0};
};

class WorkQueue {
 public:
  WorkQueue(std::int64_t units, int threads) : ranges_(new UnitRange[threads]), threads_(threads) {
    for (int thread = 0; thread < threads; ++thread) {
      ranges_[thread].set(units * thread / threads, units * (thread + 1) / threads);
    }
  }
  // The units that this thread begins with.
  Units first(int thread) const { return ranges_[thread].left(); }
  // The next for this thread: one, or all of a group of `whole`.
  Units next(int thread, std::uint64_t whole = 1) {
    Units units = ranges_[thread].take_first(whole);
    for (int other = 1; units.count == 0 && other < threads_; ++other) {
      units = ranges_[(thread + other) % threads_].take_last();
    }
    return units;
  }

 private:
  std::unique_ptr<UnitRange[]> ranges_;
  int threads_;
};

}  // namespace ray_hetero

// What the ranks of a tensor-parallel group have computed, added up by all their threads.
//
// Included once for each level, see levels.h.

#pragma once

#include "this_level.h"

#include "rank_sums.h"
#include "team.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

// A thread's share of some vectors.
class VectorShare {
 public:
  VectorShare(std::int64_t first, std::int64_t last, int thread, int threads)
      : begin_((first + (last - first) * thread / threads) * kLanes),
        end_((first + (last - first) * (thread + 1) / threads) * kLanes) {}

  // y ← the sums of what the ranks have written in one of their places.
  void add(RankSums& sums, int place, std::uint16_t* y) const {
    for (std::int64_t at = begin_; at < end_; at += kLanes) {
      Floats sum = load_floats(sums.partial(place, 0) + at);
      for (std::int64_t rank = 1; rank < sums.size(); ++rank) {
        sum = plus(sum, load_floats(sums.partial(place, rank) + at));
      }
      store_bf16(y + at, sum);
    }
  }
  template <typename T>
  void copy(const T* from, T* to) const {
    std::memcpy(to + begin_, from + begin_, (end_ - begin_) * sizeof(T));
  }

 private:
  std::int64_t begin_, end_;  // elements
};

// All threads of a rank: y [elements] ← the sums of what all ranks have written in one of their
// places, there for all threads; false if a rank is missing.  The next sums must be of the other
// place, see RankSums::first_place.
inline bool sum_over_ranks(int thread, int threads, Barrier& barrier, ReadAhead& ahead,
                           RankSums& sums, int place, std::int64_t elements, std::uint16_t* y) {
  const auto meet = [&] { sums.meet(elements, ahead); };
  const std::int64_t vectors = elements / kLanes;
  const VectorShare all(0, vectors, thread, threads);
  barrier.wait(ahead, meet);
  if (sums.is_lost()) return false;
  if (sums.are_slices(elements)) {
    const std::int64_t first = vectors * sums.own() / sums.size();
    const std::int64_t last = vectors * (sums.own() + 1) / sums.size();
    VectorShare(first, last, thread, threads).add(sums, place, sums.results());
    barrier.wait(ahead, meet);
    if (sums.is_lost()) return false;
    all.copy(sums.results(), y);
  } else {
    all.add(sums, place, y);
  }
  barrier.wait(ahead);
  return true;
}

// x [elements], float32 → y [elements], bf16: the same by itself, several times over.
inline void run(RankSums& sums, const float* x, std::int64_t elements, std::uint16_t* y,
                std::int64_t times) {
  const int first = sums.first_place(times);
  together([] {}, [&](int thread, int threads, Barrier& barrier) {
    const VectorShare all(0, elements / kLanes, thread, threads);
    ReadAhead nothing(nullptr, 0);
    for (std::int64_t time = 0; time < times; ++time) {
      const int place = (first + time) % 2;
      all.copy(x, sums.partial(place));
      if (!sum_over_ranks(thread, threads, barrier, nothing, sums, place, elements, y)) return;
    }
  });
  sums.check();
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

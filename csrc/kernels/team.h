// All threads of a process on one piece of work.

#pragma once

#include "read_ahead.h"
#include "vectors.h"

#include <omp.h>
#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstdint>
#include <new>
#include <optional>

namespace ray_hetero {

// Leave the core's units to its other thread for a moment.
inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// OpenMP's own barrier does nothing while a thread waits; here memory is not idle meanwhile.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}

  void wait(ReadAhead& ahead) {
    wait(ahead, [] {});
  }

  // The last thread to come does something before all go on.
  template <typename Last>
  void wait(ReadAhead& ahead, const Last& last) {
    const int round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      last();
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int turn = 1; round_.load(std::memory_order_acquire) == round; ++turn) {
      ahead.fetch();
      pause();
      if (turn % kTurns != 0) continue;
      // Somebody may wait for this core.
      if (turn < kManyTurns) {
        sched_yield();
      } else {
        // Nothing of this process takes so long, another one that is waited for may.
        turn = kManyTurns;
        const timespec nap{0, kNapNanoseconds};
        nanosleep(&nap, nullptr);
      }
    }
  }

 private:
  static constexpr int kTurns = 1024;
  static constexpr int kManyTurns = 128 * kTurns;
  static constexpr long kNapNanoseconds = 50'000;

  const int threads_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> round_{0};
};

// Memory that threads of a parallel region did not get; what they throw must not leave the region.
class Shortage {
 public:
  // Whether a thread has got what it takes.
  template <typename Take>
  bool has(const Take& take) {
    try {
      take();
      return true;
    } catch (const std::bad_alloc&) {
      is_.store(true, std::memory_order_relaxed);
      return false;
    }
  }
  bool is() const { return is_.load(std::memory_order_relaxed); }
  // Behind the region.
  void raise() const {
    if (is()) throw std::bad_alloc();
  }

 private:
  std::atomic<bool> is_{false};
};

// Have all threads do something, once each has taken its memory; a runtime may give fewer threads
// than it could.
template <typename Take, typename Work>
void together(const Take& take, const Work& work) {
  std::optional<Barrier> barrier;
  Shortage shortage;
#pragma omp parallel
  {
    shortage.has(take);
#pragma omp single
    barrier.emplace(omp_get_num_threads());
    // All have come to the end of `single`, so all see the same.
    if (!shortage.is()) work(omp_get_thread_num(), omp_get_num_threads(), *barrier);
  }
  shortage.raise();
}

}  // namespace ray_hetero

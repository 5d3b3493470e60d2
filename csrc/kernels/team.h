// All threads of a process on one piece of work.

#pragma once

#include "read_ahead.h"
#include "vectors.h"

#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
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
    const int round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int turn = 1; round_.load(std::memory_order_acquire) == round; ++turn) {
      ahead.fetch();
      pause();
      // Somebody may wait for this core.
      if (turn % kTurns == 0) sched_yield();
    }
  }

 private:
  static constexpr int kTurns = 1024;

  const int threads_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> round_{0};
};

// Have all threads do something; a runtime may give fewer than it could.
template <typename Work>
void together(const Work& work) {
  std::optional<Barrier> barrier;
#pragma omp parallel
  {
#pragma omp single
    barrier.emplace(omp_get_num_threads());
    work(omp_get_thread_num(), omp_get_num_threads(), *barrier);
  }
}

}  // namespace ray_hetero

// All threads of a process on one piece of work.

#pragma once

#include "denormals.h"
#include "read_ahead.h"
#include "vectors.h"

#include <omp.h>
#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstdint>
#include <exception>
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
    spin(ahead, [&] { return round_.load(std::memory_order_acquire) != round; });
  }

  // Until all threads but this one wait here.
  void wait_for_others() {
    ReadAhead nothing(nullptr, 0);
    spin(nothing, [this] { return arrived_.load(std::memory_order_acquire) == threads_ - 1; });
  }

 private:
  template <typename Until>
  static void spin(ReadAhead& ahead, const Until& until) {
    for (int turn = 1; !until(); ++turn) {
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

// Threads that stay together between pieces of work that follow one another within microseconds:
// the end of a parallel region and the beginning of the next are left out.  Work is given by the
// thread that leads them; the others wait for it at full speed, so that nobody should lead for longer
// than there is some.
class Team {
 public:
  explicit Team(int threads) : threads_(threads), begin_(threads), barrier_(threads) {}

  // The one that this thread leads, or nullptr.
  static Team*& led() {
    static thread_local Team* team = nullptr;
    return team;
  }

  // `together` for the leader.
  template <typename Take, typename Work>
  void run(const Take& take, const Work& work) {
    Shortage shortage;
    const auto share = [&](int thread) {
      shortage.has(take);
      ReadAhead nothing(nullptr, 0);
      barrier_.wait(nothing);
      if (!shortage.is()) work(thread, threads_, barrier_);
    };
    give([](const void* given, int thread) { (*static_cast<const decltype(share)*>(given))(thread); },
         &share);
    share(0);
    begin_.wait_for_others();
    shortage.raise();
  }

  // The other threads do what they are given, until the leader ends the team.
  void follow(int thread) {
    ReadAhead nothing(nullptr, 0);
    for (begin_.wait(nothing); share_ != nullptr; begin_.wait(nothing)) share_(given_, thread);
  }
  void end() { give(nullptr, nullptr); }

 private:
  using Share = void (*)(const void* given, int thread);

  void give(Share share, const void* given) {
    share_ = share, given_ = given;
    ReadAhead nothing(nullptr, 0);
    begin_.wait(nothing);
  }

  const int threads_;
  Share share_ = nullptr;  // what all are to do, with `given_`; nullptr is the end
  const void* given_ = nullptr;
  Barrier begin_, barrier_;
};

// Call something that leads all threads meanwhile.
inline void with_team(void (*work)(void*), void* context) {
  std::optional<Team> team;
  std::exception_ptr problem;
#pragma omp parallel
  {
    const DenormalsAreZero mode;
#pragma omp single
    team.emplace(omp_get_num_threads());
    if (omp_get_thread_num() != 0) {
      team->follow(omp_get_thread_num());
    } else {
      Team::led() = &*team;
      try {
        work(context);
      } catch (...) {
        problem = std::current_exception();
      }
      Team::led() = nullptr;
      team->end();
    }
  }
  if (problem != nullptr) std::rethrow_exception(problem);
}

// Have all threads do something, once each has taken its memory; a runtime may give fewer threads
// than it could.
template <typename Take, typename Work>
void together(const Take& take, const Work& work) {
  if (Team* team = Team::led(); team != nullptr) {
    team->run(take, work);
    return;
  }
  std::optional<Barrier> barrier;
  Shortage shortage;
#pragma omp parallel
  {
    const DenormalsAreZero mode;
    shortage.has(take);
#pragma omp single
    barrier.emplace(omp_get_num_threads());
    // All have come to the end of `single`, so all see the same.
    if (!shortage.is()) work(omp_get_thread_num(), omp_get_num_threads(), *barrier);
  }
  shortage.raise();
}

}  // namespace ray_hetero

// The words in shared memory by which ranks of the stages hand tokens over to expert ranks.
//
// For each expert rank there are two: a request, which the sender sets and the expert rank takes
// back, and an answer, which the expert rank sets and the sender takes back.  So both are the same
// constants in every step, which a captured CUDA graph can write and wait for.  A third one counts
// the expert rank's answers, for whoever watches whether it goes on.  One more word says which rows
// of the step are no drafts, for the expert rank to count.  Behind them is what both ends say about
// slots (slot_orders.h).
//
//   sender                      expert rank
//   tokens, ids, weights
//   request = layer and tokens
//                               computes
//                               result; request = 0; count + 1; answer = 1
//   waits for answer = 1
//   answer = 0; reads result

#pragma once

#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ray_hetero {

using Word = std::atomic<std::uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4, "words are shared by processes");

// A request is tokens · 2^kLayerBits + number of the layer + 1.
constexpr int kLayerBits = 12;
constexpr std::uint32_t kLayers = (1u << kLayerBits) - 1;
constexpr std::uint32_t kTokens = 1u << (32 - kLayerBits);
// Bytes from one word to the next: what a processor fetches at once, so that nobody's waiting
// slows down another's writing.
constexpr std::int64_t kWordBytes = 128;

// Bytes behind the words, for slots.
constexpr std::int64_t kSlotBytes = 5 * kWordBytes;

// The words of a channel: one that says that it has failed, then requests, answers and counts, and
// one with the distance between two rows of a step that are no drafts, 0 where there is no such.
class Words {
 public:
  Words(std::uint8_t* memory, std::int64_t ranks) : memory_(memory), ranks_(ranks) {}

  std::int64_t ranks() const { return ranks_; }
  Word& failed() const { return at(0); }
  Word& request(std::int64_t rank) const { return at(1 + rank); }
  Word& answer(std::int64_t rank) const { return at(1 + ranks_ + rank); }
  Word& count(std::int64_t rank) const { return at(1 + 2 * ranks_ + rank); }
  Word& every() const { return at(1 + 3 * ranks_); }
  std::uint8_t* slots() const { return memory_ + (2 + 3 * ranks_) * kWordBytes; }
  static std::int64_t bytes(std::int64_t ranks) {
    return (2 + 3 * ranks) * kWordBytes + kSlotBytes;
  }

 private:
  Word& at(std::int64_t place) const {
    return *reinterpret_cast<Word*>(memory_ + place * kWordBytes);
  }

  std::uint8_t* memory_;
  std::int64_t ranks_;
};

inline double now_s() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Waiting for a word: at full speed while something is under way, then with sleeps; with sleeps at
// once where others compute on the same core.  A thread that yields its core again and again there
// gets it back later and later, and what it waits for may need that core.
class Patience {
 public:
  // From now on full speed again.
  void renew() { turns_ = is_shared() ? kTurns - 1 : 0, since_s_ = -1; }

  // One turn; whether the clock was looked at, which is when others may be too.
  bool wait() {
#if defined(__x86_64__)
    _mm_pause();
#endif
    if (++turns_ % kTurns != 0) return false;
    const double before_s = now_s_;
    now_s_ = now_s();
    if (since_s_ < 0) {
      since_s_ = now_s_;
    } else {
      // An interruption by itself is nothing; where others compute, it comes with every yield.
      taken_ = now_s_ - before_s > kOthersSeconds ? taken_ + 1 : 0;
      if (taken_ > 1) shared_until_s_ = now_s_ + kSharedSeconds;
    }
    if (now_s_ - since_s_ < kEagerSeconds && now_s_ > shared_until_s_) {
      sched_yield();  // somebody may wait for this core
    } else {
      const timespec nap{0, kNapNanoseconds};
      nanosleep(&nap, nullptr);
      turns_ = kTurns - 1;
    }
    return true;
  }
  double now() const { return now_s_; }
  // Whether others compute on the same core.
  bool is_shared() const { return now_s_ < shared_until_s_; }

 private:
  static constexpr int kTurns = 512;
  static constexpr double kEagerSeconds = 0.05;
  static constexpr long kNapNanoseconds = 20'000;
  // Turns take microseconds, so that this long somebody else has had the core; naps are shorter.
  static constexpr double kOthersSeconds = 0.001;
  static constexpr double kSharedSeconds = 0.5;

  int turns_ = 0, taken_ = 0;
  double since_s_ = -1, now_s_ = 0, shared_until_s_ = 0;
};

}  // namespace ray_hetero

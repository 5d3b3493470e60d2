// Sums over the ranks of a tensor-parallel group, in memory that the processes of one host share.
//
// Each rank writes its partial sums, in float32, where the others read them.  Once all ranks have
// come, each adds up all of them, in the order of the ranks, and rounds them once: all ranks hold the
// same bits, whatever the number of threads.  Where more than two ranks have much to add up, each
// adds up its slice only, and reads the others' results once all have come again.
//
// A rank that does not come in time, or whose process has ended, ends the others' wait.

#pragma once

#include "read_ahead.h"
#include "sizes.h"
#include "team.h"

#include <poll.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ray_hetero {

// A rank of the group is not there any more, or computes something else.
struct MissingRank : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class RankSums {
 public:
  // The memory, zeroed before the first rank uses it: a header, results, and for each rank two places
  // for partial sums, in turns: while one is written, others may still read the other.  `connections`
  // are sockets that end with the rank at their other end, by rank of the group; -1 for none.
  RankSums(std::uint8_t* memory, std::int64_t bytes, std::int64_t elements, std::vector<int> ranks,
           std::int64_t own, double limit_s, std::vector<int> connections)
      : memory_(memory), elements_(elements), ranks_(std::move(ranks)), own_(own),
        limit_s_(limit_s), connections_(std::move(connections)) {
    if (ranks_.size() < 2 || own < 0 || own >= size() || elements <= 0 ||
        connections_.size() != ranks_.size() || bytes != needed(size(), elements)) {
      throw std::invalid_argument("expected 2 ranks and more, and memory for their sums");
    }
  }

  // Bytes of the memory of a group.
  static std::int64_t needed(std::int64_t ranks, std::int64_t elements) {
    return partial_at(ranks, elements, ranks);
  }
  // Where the partial sums of a rank begin; each rank's are in pages of their own.
  static std::int64_t partial_at(std::int64_t ranks, std::int64_t elements, std::int64_t rank) {
    return pages(kLineBytes * (1 + ranks)) + pages(elements * 2) + rank * 2 * pages(elements * 4);
  }

  std::int64_t size() const { return static_cast<std::int64_t>(ranks_.size()); }
  std::int64_t own() const { return own_; }
  std::int64_t elements() const { return elements_; }
  // The place of the first of so many sums, which are in turns from there on.  Every sum's place is to
  // be asked for, in the order in which they come.
  int first_place(std::int64_t sums) {
    const auto first = static_cast<int>(sums_ % 2);
    sums_ += sums;
    return first;
  }
  float* partial(int place) { return partial(place, own_); }
  float* partial(int place, std::int64_t rank) {
    const std::int64_t at = partial_at(size(), elements_, rank) + place * pages(elements_ * 4);
    return reinterpret_cast<float*>(memory_ + at);
  }
  // Whether to add up slices costs less than to wait once more.
  bool are_slices(std::int64_t elements) const { return size() > 2 && elements >= kMuch; }
  std::uint16_t* results() {
    return reinterpret_cast<std::uint16_t*>(memory_ + pages(kLineBytes * (1 + size())));
  }

  // One thread of each rank: wait until all ranks have come, with sums of so many elements.
  void meet(std::int64_t elements, ReadAhead& ahead) {
    if (lost_ != 0) return;
    ++round_;
    line(own_).elements[round_ % 2].store(elements, std::memory_order_relaxed);
    line(own_).round.store(round_, std::memory_order_release);
    for (std::int64_t rank = 0; rank < size() && lost_ == 0; ++rank) {
      if (rank != own_) await(rank, elements, ahead);
    }
  }
  // Whether a rank is missing; for all threads behind a barrier with the one that has met others.
  bool is_lost() const { return lost_ != 0; }
  void check() const {
    if (lost_ == 0) return;
    const std::string rank = "rank " + std::to_string(ranks_[(lost_ - 1) % kMostRanks]) +
                             ", of the same tensor-parallel group, ";
    const auto why = static_cast<Why>((lost_ - 1) / kMostRanks);
    if (why == Why::kOther) throw MissingRank(rank + "computes another step");
    if (why == Why::kEnded) throw MissingRank(rank + "has ended");
    std::string limit = std::to_string(limit_s_);
    limit.erase(limit.find_last_not_of('0') + 1);
    if (limit.back() == '.') limit.pop_back();
    throw MissingRank(rank + "was not there in " + limit + " s (exchange.timeout_s)");
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;

  static constexpr std::int64_t kPage = 4096;
  static constexpr std::int64_t kMuch = 16384;  // elements
  static constexpr std::int32_t kMostRanks = 1 << 16;
  static constexpr int kTurns = 1024;           // between two looks at the clock
  static constexpr double kPatience = 0.002;    // seconds after which a core is left to others
  static constexpr long kSleepNanoseconds = 50'000;

  enum class Why { kLate, kEnded, kOther };
  // What each rank tells the others.
  struct alignas(kLineBytes) Line {
    std::atomic<std::uint64_t> round;  // how often it has come
    // Of what it adds up, in turns: others may look when it has come once more, but not twice.
    std::atomic<std::int64_t> elements[2];
  };
  struct alignas(kLineBytes) Header {
    std::atomic<std::int32_t> lost;  // 0, or which rank is missing and why, as the first one found
  };
  static_assert(sizeof(Line) == kLineBytes && sizeof(Header) == kLineBytes);
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

  static std::int64_t pages(std::int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

  Header& header() { return *reinterpret_cast<Header*>(memory_); }
  Line& line(std::int64_t rank) {
    return *reinterpret_cast<Line*>(memory_ + kLineBytes * (1 + rank));
  }

  void await(std::int64_t rank, std::int64_t elements, ReadAhead& ahead) {
    Line& other = line(rank);
    Clock::time_point begin{};
    for (int turn = 1; other.round.load(std::memory_order_acquire) < round_; ++turn) {
      ahead.fetch();
      pause();
      if (turn % kTurns != 0) continue;
      if (turn == kTurns) begin = Clock::now();
      const double waited = Seconds(Clock::now() - begin).count();
      if (waited < kPatience) {
        sched_yield();
        continue;
      }
      turn = kTurns;
      if (look(rank, waited)) return;
      const timespec nap{0, kSleepNanoseconds};
      nanosleep(&nap, nullptr);
    }
    const auto& theirs = other.elements[round_ % 2];
    if (theirs.load(std::memory_order_relaxed) != elements) lose(rank, Why::kOther);
  }

  // Whether the wait for a rank is over because somebody is missing.
  bool look(std::int64_t rank, double waited) {
    if (const std::int32_t lost = header().lost.load(std::memory_order_relaxed); lost != 0) {
      lost_ = lost;
    } else if (const std::int64_t ended = first_ended(); ended >= 0) {
      lose(ended, Why::kEnded);
    } else if (waited > limit_s_) {
      lose(rank, Why::kLate);
    }
    return lost_ != 0;
  }

  std::int64_t first_ended() const {
    for (std::size_t rank = 0; rank < connections_.size(); ++rank) {
      pollfd one{connections_[rank], 0, 0};
      if (poll(&one, 1, 0) > 0 && (one.revents & (POLLHUP | POLLERR)) != 0) {
        return static_cast<std::int64_t>(rank);
      }
    }
    return -1;
  }

  void lose(std::int64_t rank, Why why) {
    std::int32_t expected = 0;
    lost_ = 1 + static_cast<std::int32_t>(rank) + kMostRanks * static_cast<std::int32_t>(why);
    // The first one to find out names the rank for all.
    if (!header().lost.compare_exchange_strong(expected, lost_)) lost_ = expected;
  }

  std::uint8_t* memory_;
  const std::int64_t elements_;
  const std::vector<int> ranks_;  // as the user knows them
  const std::int64_t own_;        // of the group
  const double limit_s_;
  const std::vector<int> connections_;
  std::uint64_t round_ = 0;
  std::int64_t sums_ = 0;  // for which there was a place
  std::int32_t lost_ = 0;
};

}  // namespace ray_hetero

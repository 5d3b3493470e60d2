// Experts that the tokens of small steps have chosen, on their way to a file.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace ray_hetero {

// The expert that a number stands for in what is handed over: the number itself, or that of an
// expert in a slot of the GPU, which computes it; -1 for none.
inline std::int64_t expert_of(std::int32_t id) {
  return id >= -1 ? id : -2 - static_cast<std::int64_t>(id);
}

// Records of 16-bit numbers: a layer, how many tokens, and the experts of each token.  One thread
// adds, another one takes.
class Routes {
 public:
  static constexpr std::uint16_t kNone = 0xffff;  // in place of an expert
  static constexpr std::size_t kMost = 8 << 20;   // numbers that wait to be taken

  // Begin to keep records.
  void open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.reserve(kMost);
    is_open_ = true;
  }
  bool is_open() const { return is_open_; }

  // Every `every`-th token is kept; a record that there is no room for is lost.
  void add(std::int64_t layer, const std::int32_t* ids, std::int64_t tokens, std::int64_t chosen,
           std::int64_t every) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::int64_t kept = (tokens + every - 1) / every;
    if (waiting_.size() + static_cast<std::size_t>(2 + kept * chosen) > kMost) {
      ++lost_;
      return;
    }
    waiting_.push_back(static_cast<std::uint16_t>(layer));
    waiting_.push_back(static_cast<std::uint16_t>(kept));
    for (std::int64_t token = 0; token < tokens; token += every) {
      for (std::int64_t i = token * chosen; i < (token + 1) * chosen; ++i) {
        const std::int64_t expert = expert_of(ids[i]);
        waiting_.push_back(expert < 0 || expert >= kNone ? kNone
                                                         : static_cast<std::uint16_t>(expert));
      }
    }
  }

  // Records since the last call, and how many were lost; none are kept any more if `close`.
  std::pair<std::vector<std::uint16_t>, std::int64_t> take(bool close) {
    std::vector<std::uint16_t> next;
    if (!close) next.reserve(kMost);
    const std::lock_guard<std::mutex> lock(mutex_);
    std::swap(next, waiting_);
    is_open_ = !close;
    return {std::move(next), std::exchange(lost_, 0)};
  }

 private:
  std::mutex mutex_;
  std::vector<std::uint16_t> waiting_;
  std::int64_t lost_ = 0;
  std::atomic<bool> is_open_ = false;
};

}  // namespace ray_hetero

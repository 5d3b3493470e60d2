// The channels of an expert rank, which computes what their senders ask for.

#pragma once

#include "channel.h"

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace ray_hetero {

// Read by a thread that reports, while another one counts.
struct Totals {
  using Count = std::atomic<std::int64_t>;

  Count steps = 0, tokens = 0, layers = 0, layer_tokens = 0, experts = 0, computing_ns = 0,
        waiting_ns = 0;

  static void add(Count& count, std::int64_t more) {
    count.store(count.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
  }
};

inline std::int64_t nanoseconds(double seconds) { return static_cast<std::int64_t>(1e9 * seconds); }

class Receiver {
 public:
  using Asked = std::tuple<std::int64_t, std::int64_t, std::int64_t>;

  explicit Receiver(WithTeam with_team) : with_team_(with_team) {}

  // Serve a channel; throws std::invalid_argument, see Channel::check.
  void add(const Channel& made, std::int64_t elements, std::int64_t routes) {
    made.check(made.words.ranks(), elements, routes);
    channels_.push_back(made);
  }

  // Compute what comes, for so long; then nothing, or (channel, layer, tokens) that Python is to
  // compute and to finish.
  std::optional<Asked> serve(double limit_s) {
    end_s_ = now_s() + limit_s;
    left_to_python_.reset();
    while (true) {
      if (!is_asked()) {
        if (patience_.wait() && patience_.now() > looked_s_ + kLookSeconds) {
          look();
          if (looked_s_ > end_s_) return std::nullopt;
        }
      } else if (with_team_ == nullptr || patience_.is_shared()) {
        compute_all();
      } else {
        with_team_([](void* self) { static_cast<Receiver*>(self)->compute_steps(); }, this);
      }
      if (left_to_python_.has_value()) return left_to_python_;
      if (answered_s_ > end_s_) return std::nullopt;
    }
  }

  // Answer a request that Python has computed.
  void finish(std::int64_t channel) { answer(channels_.at(channel)); }

  const Totals& totals() const { return totals_; }

 private:
  static constexpr double kLookSeconds = 0.02;
  // Between two requests; what is longer is no pause within steps.
  static constexpr double kLongestPause = 0.05;
  // After the last layer of a step, for which threads stay ready for the next step's first.
  static constexpr double kReadySeconds = 0.002;

  bool is_asked() const {
    for (const Channel& channel : channels_) {
      if (channel.words.request(channel.rank).load(std::memory_order_acquire) != 0) return true;
    }
    return false;
  }

  // Layers of steps, until none has come for a while, Python is to compute one, or it is time to
  // look at other things.
  void compute_steps() {
    while (!left_to_python_.has_value() && answered_s_ < end_s_) {
      compute_all();
      if (patience_.wait() &&
          (patience_.is_shared() || patience_.now() > answered_s_ + kReadySeconds)) {
        return;
      }
    }
  }

  // What is asked for now.
  void compute_all() {
    for (std::size_t i = 0; i < channels_.size(); ++i) {
      Channel& channel = channels_[i];
      const std::uint32_t request =
          channel.words.request(channel.rank).load(std::memory_order_acquire);
      if (request == 0) continue;
      patience_.renew();
      const std::int64_t number = static_cast<std::int64_t>(request & kLayers) - 1;
      const std::int64_t tokens = request >> kLayerBits;
      if (number < 0 || number >= static_cast<std::int64_t>(channel.layers.size()) ||
          tokens <= 0 || tokens > channel.capacity) {
        throw std::runtime_error("a request of layer " + std::to_string(number) + " for " +
                                 std::to_string(tokens) + " tokens is none that was agreed on");
      }
      const Layer& layer = channel.layers[number];
      begin(i, number, tokens);
      if (layer.compute == nullptr) {
        left_to_python_ = Asked(static_cast<std::int64_t>(i), number, tokens);
        return;
      }
      compute(channel, layer, tokens);
    }
  }

  // Count a request: a step has one of the first layer that the first sender with layers has.
  void begin(std::size_t number, std::int64_t layer, std::int64_t tokens) {
    const Channel& channel = channels_[number];
    began_s_ = now_s();
    const double pause_s = began_s_ - answered_s_;
    if (pause_s < kLongestPause) Totals::add(totals_.waiting_ns, nanoseconds(pause_s));
    std::size_t first = 0;
    while (channels_[first].layers.empty()) ++first;
    if (number == first && layer == 0) {
      Totals::add(totals_.steps, 1);
      Totals::add(totals_.tokens, tokens);
    }
    Totals::add(totals_.layers, 1);
    Totals::add(totals_.layer_tokens, tokens);
    Totals::add(totals_.experts, distinct(channel.ids, tokens * channel.layers[layer].chosen));
  }

  // How many experts there are among these; negative numbers stand for none.
  std::int64_t distinct(const std::int32_t* ids, std::int64_t count) {
    std::int64_t found = 0;
    ++turn_;
    for (std::int64_t i = 0; i < count; ++i) {
      if (ids[i] < 0) continue;
      const std::size_t id = static_cast<std::size_t>(ids[i]);
      if (id >= kMostExperts) {
        throw std::runtime_error("a token of expert " + std::to_string(id) + ", expected one below " +
                                 std::to_string(kMostExperts));
      }
      if (id >= seen_.size()) seen_.resize(id + 1, 0);
      found += seen_[id] != turn_;
      seen_[id] = turn_;
    }
    return found;
  }

  void compute(Channel& channel, const Layer& layer, std::int64_t tokens) {
    const char* problem =
        layer.compute(layer.context, {channel.x, channel.ids, channel.weights, channel.y, tokens,
                                      layer.hidden, layer.chosen});
    if (problem != nullptr) throw std::runtime_error(problem);
    answer(channel);
  }

  void answer(Channel& channel) {
    channel.words.request(channel.rank).store(0, std::memory_order_relaxed);
    channel.words.count(channel.rank).fetch_add(1, std::memory_order_release);
    channel.words.answer(channel.rank).store(1, std::memory_order_release);
    answered_s_ = now_s();
    Totals::add(totals_.computing_ns, nanoseconds(answered_s_ - began_s_));
  }

  // Whether the senders are still there; a closed socket can be read.
  void look() {
    looked_s_ = now_s();
    std::vector<pollfd> asked;
    for (const Channel& channel : channels_) asked.push_back({channel.connection, POLLIN, 0});
    if (poll(asked.data(), asked.size(), 0) <= 0) return;
    for (std::size_t i = 0; i < asked.size(); ++i) {
      if (asked[i].revents != 0) {
        throw std::out_of_range(std::to_string(i));
      }
    }
  }

  const WithTeam with_team_;  // or nullptr, where threads wait for each layer in their own way
  std::vector<Channel> channels_;
  Patience patience_;
  double looked_s_ = 0, began_s_ = 0, answered_s_ = 0, end_s_ = 0;
  std::optional<Asked> left_to_python_;
  std::vector<std::uint64_t> seen_;  // by expert: the request that has counted it last
  std::uint64_t turn_ = 0;
  Totals totals_;
};

}  // namespace ray_hetero

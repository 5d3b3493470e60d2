// The channels of an expert rank, which computes what their senders ask for.

#pragma once

#include "channel.h"
#include "routes.h"

#include <poll.h>

#include <array>
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
  // Of steps that slots are counted for; and what slots of each size have held of their experts.
  Count slot_steps = 0, slot_layers = 0, slot_experts = 0, slot_computing_ns = 0,
        slot_waiting_ns = 0;
  std::array<Count, kSlotSizes> slot_hits{}, slot_copies{};
  // Part of slot_experts that a GPU has computed from its slots.
  Count slot_held = 0;

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
    Channel& channel = channels_.back();
    channel.first = layers_;
    layers_ += static_cast<std::int64_t>(channel.layers.size());
    for (const Layer& layer : channel.layers) channel.slots.emplace_back(layer.experts);
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
  void finish(std::int64_t number) {
    Channel& channel = channels_.at(number);
    answer(channel);
    count_slots(channel, asked_);
  }

  const Totals& totals() const { return totals_; }

  // Experts that tokens of small steps have chosen, once it is open.
  Routes& routes() { return routes_; }

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
        asked_ = number;
        left_to_python_ = Asked(static_cast<std::int64_t>(i), number, tokens);
        return;
      }
      compute(channel, layer, tokens);
    }
  }

  // Count a request: a step has one of the first layer that the first sender with layers has.
  void begin(std::size_t number, std::int64_t layer, std::int64_t tokens) {
    Channel& channel = channels_[number];
    began_s_ = now_s();
    const double pause_s = began_s_ - answered_s_;
    waited_ns_ = pause_s < kLongestPause ? nanoseconds(pause_s) : 0;
    Totals::add(totals_.waiting_ns, waited_ns_);
    std::size_t first = 0;
    while (channels_[first].layers.empty()) ++first;
    const bool is_first = number == first && layer == 0;
    if (is_first) {
      Totals::add(totals_.steps, 1);
      Totals::add(totals_.tokens, tokens);
    }
    Totals::add(totals_.layers, 1);
    Totals::add(totals_.layer_tokens, tokens);
    const std::int64_t chosen = channel.layers[layer].chosen;
    find(channel.ids, tokens, chosen, 1);
    Totals::add(totals_.experts, static_cast<std::int64_t>(found_.size()) - held_);
    slots_ = nullptr;
    const std::int64_t every = channel.words.every().load(std::memory_order_relaxed);
    if (every == 0 || tokens > kCountedTokens || channel.layers[layer].experts == 0) return;
    if (every > 1) find(channel.ids, tokens, chosen, every);
    slots_ = &channel.slots[layer];
    Totals::add(totals_.slot_waiting_ns, waited_ns_);
    Totals::add(totals_.slot_steps, is_first);
    if (routes_.is_open()) routes_.add(channel.first + layer, channel.ids, tokens, chosen, every);
  }

  // The experts of every so many tokens, each once, and how many of them a GPU computes.
  void find(const std::int32_t* ids, std::int64_t tokens, std::int64_t chosen, std::int64_t every) {
    found_.clear();
    held_ = 0;
    ++turn_;
    for (std::int64_t token = 0; token < tokens; token += every) {
      find(ids + token * chosen, chosen);
    }
  }
  void find(const std::int32_t* ids, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      if (ids[i] == -1) continue;
      const std::size_t id = static_cast<std::size_t>(expert_of(ids[i]));
      if (id >= kMostExperts) {
        throw std::runtime_error("a token of expert " + std::to_string(id) + ", expected one below " +
                                 std::to_string(kMostExperts));
      }
      if (id >= seen_.size()) seen_.resize(id + 1, 0);
      if (seen_[id] != turn_) {
        found_.push_back(static_cast<std::int32_t>(id));
        held_ += ids[i] < 0;
      }
      seen_[id] = turn_;
    }
  }

  // What slots would have held of the layer that was answered; while the sender goes on.
  void count_slots(Channel& channel, std::int64_t layer) {
    if (slots_ == nullptr) return;
    for (const std::int32_t expert : found_) {
      if (expert >= slots_->experts()) return;  // none that was agreed on
    }
    const SlotCounts counted = count_slots_of_gpu(channel, layer);
    Totals::add(totals_.slot_layers, 1);
    Totals::add(totals_.slot_experts, counted.experts);
    Totals::add(totals_.slot_held, held_);
    for (std::size_t size = 0; size < kSlotSizes; ++size) {
      Totals::add(totals_.slot_hits[size], counted.hits[size]);
      Totals::add(totals_.slot_copies[size], counted.copies[size]);
    }
  }

  // Keep the book of the slots that the sender's GPU has, and tell it what it is to copy.
  SlotCounts count_slots_of_gpu(Channel& channel, std::int64_t layer) {
    // All expert ranks see the same tokens; one of them speaks.
    SlotOrders orders(channel.words);
    const std::uint32_t slots = channel.rank == 0 ? orders.slots() : 0;
    if (slots == 0) return slots_->step(found_);
    const std::uint32_t turn = orders.turn();
    if (slots != channel.count || turn != channel.turn) {
      for (LayerSlots& one : channel.slots) one.have(slots);
      channel.count = slots, channel.turn = turn;
    }
    SlotSums& sums = channel.sums;
    if (layer <= channel.last || sums.steps == 0) {
      ++sums.steps;
      channel.from = channel.refused < 0 ? 0 : channel.refused;
      channel.refused = -1;
    }
    channel.last = layer;
    const std::int64_t layers = static_cast<std::int64_t>(channel.layers.size());
    std::int64_t given = 0;
    const SlotCounts counted = slots_->step(found_, [&](std::int32_t expert, std::size_t slot) {
      if (!SlotOrders::follows(turn)) return true;
      // A layer that had no room in the step before comes first, so that each has its turn.
      if (layer < channel.from) return false;
      const bool has_room = orders.give(turn, layer, expert, static_cast<std::int64_t>(slot));
      if (!has_room && channel.refused < 0) channel.refused = (layer + (given > 0)) % layers;
      given += has_room;
      return has_room;
    });
    ++sums.layers;
    sums.computing_ns += static_cast<std::uint64_t>(took_ns_);
    sums.waiting_ns += static_cast<std::uint64_t>(waited_ns_);
    sums.experts += static_cast<std::uint64_t>(counted.experts);
    sums.hits += static_cast<std::uint64_t>(counted.hits[kSlotSizes]);
    sums.copies += static_cast<std::uint64_t>(counted.copies[kSlotSizes]);
    orders.tell(sums);
    return counted;
  }

  void compute(Channel& channel, const Layer& layer, std::int64_t tokens) {
    const char* problem =
        layer.compute(layer.context, {channel.x, channel.ids, channel.weights, channel.y, tokens,
                                      layer.hidden, layer.chosen});
    if (problem != nullptr) throw std::runtime_error(problem);
    answer(channel);
    count_slots(channel, &layer - channel.layers.data());
  }

  void answer(Channel& channel) {
    channel.words.request(channel.rank).store(0, std::memory_order_relaxed);
    channel.words.count(channel.rank).fetch_add(1, std::memory_order_release);
    channel.words.answer(channel.rank).store(1, std::memory_order_release);
    answered_s_ = now_s();
    took_ns_ = nanoseconds(answered_s_ - began_s_);
    Totals::add(totals_.computing_ns, took_ns_);
    if (slots_ != nullptr) Totals::add(totals_.slot_computing_ns, took_ns_);
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
  std::int64_t waited_ns_ = 0, took_ns_ = 0;  // before the request, and for it
  std::optional<Asked> left_to_python_;
  std::int64_t asked_ = 0;           // layer that is left to Python
  std::vector<std::uint64_t> seen_;  // by expert: the request that has counted it last
  std::uint64_t turn_ = 0;
  std::vector<std::int32_t> found_;  // experts of the request, those of drafts not among them
  std::int64_t held_ = 0;            // how many of them a GPU computes
  LayerSlots* slots_ = nullptr;      // of the request's layer, if its step is counted
  std::int64_t layers_ = 0;          // of all channels
  Routes routes_;
  Totals totals_;
};

}  // namespace ray_hetero

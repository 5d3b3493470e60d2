// Python's face of the handover of tokens to expert ranks; the typed one is
// ray_hetero/distributed/expert_handover.py.

#include "channel.h"

#include <poll.h>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <deque>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

using namespace ray_hetero;

template <typename T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

std::uint32_t request_of(std::int64_t layer, std::int64_t tokens) {
  if (layer < 0 || layer >= static_cast<std::int64_t>(kLayers) || tokens <= 0 ||
      tokens >= static_cast<std::int64_t>(kTokens)) {
    throw py::value_error("expected a layer below " + std::to_string(kLayers) +
                          " and 1 to " + std::to_string(kTokens - 1) + " tokens, got layer " +
                          std::to_string(layer) + " and " + std::to_string(tokens) + " tokens");
  }
  return static_cast<std::uint32_t>(tokens) << kLayerBits | static_cast<std::uint32_t>(layer + 1);
}

// ---- the sender's end ------------------------------------------------------------------------

// A sender that waits in its own thread; one on a GPU has the GPU write and wait for the words.
class Sender {
 public:
  Sender(std::uintptr_t memory, std::int64_t ranks)
      : words_(pointer<std::uint8_t>(memory), ranks) {}

  void post(std::int64_t layer, std::int64_t tokens) {
    const std::uint32_t request = request_of(layer, tokens);
    for (std::int64_t rank = 0; rank < words_.ranks(); ++rank) {
      words_.request(rank).store(request, std::memory_order_release);
    }
  }

  // Whether all have answered; not when the channel has failed, which ends the wait.
  bool wait() {
    patience_.renew();
    for (std::int64_t rank = 0; rank < words_.ranks(); ++rank) {
      while (words_.answer(rank).load(std::memory_order_acquire) == 0) patience_.wait();
    }
    for (std::int64_t rank = 0; rank < words_.ranks(); ++rank) {
      words_.answer(rank).store(0, std::memory_order_relaxed);
    }
    return words_.failed().load(std::memory_order_acquire) == 0;
  }

  // Expert ranks that have not taken back their request, each with the answers it has given.
  std::vector<std::pair<std::int64_t, std::uint32_t>> owing() const {
    std::vector<std::pair<std::int64_t, std::uint32_t>> found;
    for (std::int64_t rank = 0; rank < words_.ranks(); ++rank) {
      const std::uint32_t count = words_.count(rank).load(std::memory_order_acquire);
      if (words_.request(rank).load(std::memory_order_acquire) != 0) found.push_back({rank, count});
    }
    return found;
  }

  // What a host function in a CUDA stream calls, with what; valid as long as this.
  std::pair<std::uintptr_t, std::uintptr_t> posting(std::int64_t layer, std::int64_t tokens) {
    posts_.push_back({this, layer, tokens});
    return {reinterpret_cast<std::uintptr_t>(+[](void* given) {
              const Post& post = *static_cast<const Post*>(given);
              post.sender->post(post.layer, post.tokens);
            }),
            reinterpret_cast<std::uintptr_t>(&posts_.back())};
  }
  std::pair<std::uintptr_t, std::uintptr_t> waiting() {
    return {reinterpret_cast<std::uintptr_t>(+[](void* given) {
              static_cast<Sender*>(given)->wait();
            }),
            reinterpret_cast<std::uintptr_t>(this)};
  }

  // End every wait, from any thread; again and again, as a GPU takes answers back.
  void release() {
    words_.failed().store(1, std::memory_order_release);
    for (std::int64_t rank = 0; rank < words_.ranks(); ++rank) {
      words_.answer(rank).store(1, std::memory_order_release);
    }
  }
  bool has_failed() const { return words_.failed().load(std::memory_order_acquire) != 0; }

 private:
  struct Post {
    Sender* sender;
    std::int64_t layer, tokens;
  };

  Words words_;
  Patience patience_;  // of the one thread that waits
  std::deque<Post> posts_;
};

// ---- the expert rank's end -------------------------------------------------------------------

// Read by a thread that reports, while another one counts.
struct Totals {
  using Count = std::atomic<std::int64_t>;

  Count steps = 0, tokens = 0, layers = 0, layer_tokens = 0, experts = 0, computing_ns = 0,
        waiting_ns = 0;

  static void add(Count& count, std::int64_t more) {
    count.store(count.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
  }
};

std::int64_t nanoseconds(double seconds) { return static_cast<std::int64_t>(1e9 * seconds); }

class Receiver {
 public:
  using AsLayer = std::tuple<std::uintptr_t, std::uintptr_t, std::int64_t, std::int64_t>;
  using Asked = std::tuple<std::int64_t, std::int64_t, std::int64_t>;

  explicit Receiver(std::uintptr_t with_team) : with_team_(reinterpret_cast<WithTeam>(with_team)) {}

  void add(std::uintptr_t memory, std::int64_t ranks, std::int64_t rank, int connection,
           std::uintptr_t x, std::uintptr_t ids, std::uintptr_t weights, std::uintptr_t y,
           std::int64_t capacity, std::int64_t elements, std::int64_t routes,
           const std::vector<AsLayer>& layers) {
    Channel made{Words(pointer<std::uint8_t>(memory), ranks), rank, connection,
                 pointer<const std::uint8_t>(x), pointer<const std::int32_t>(ids),
                 pointer<const float>(weights), pointer<std::uint8_t>(y), capacity, {}};
    for (const auto& [compute, context, hidden, chosen] : layers) {
      made.layers.push_back({reinterpret_cast<ComputeExperts>(compute),
                             pointer<const void>(context), hidden, chosen});
    }
    made.check(ranks, elements, routes);
    channels_.push_back(made);
  }

  // Compute what comes, for so long; then nothing, or (channel, layer, tokens) that Python is to
  // compute and to finish.
  std::optional<Asked> serve(double limit_s) {
    py::gil_scoped_release release;
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

  py::dict totals() const {
    py::dict found;
    found["steps"] = totals_.steps.load();
    found["tokens"] = totals_.tokens.load();
    found["layers"] = totals_.layers.load();
    found["layer_tokens"] = totals_.layer_tokens.load();
    found["experts"] = totals_.experts.load();
    found["computing_s"] = 1e-9 * static_cast<double>(totals_.computing_ns.load());
    found["waiting_s"] = 1e-9 * static_cast<double>(totals_.waiting_ns.load());
    return found;
  }

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

// Experts of no size, for tests and for measuring the handover: tokens of 16-bit values come back.
const char* echo(const void*, const ExpertTokensAt& tokens) {
  std::memcpy(tokens.y, tokens.x, 2 * tokens.m * tokens.hidden);
  return nullptr;
}

}  // namespace

PYBIND11_MODULE(_expert_handover, module) {
  module.doc() = "The handover of tokens to expert ranks through memory that both ends map.";
  module.attr("WORD_BYTES") = kWordBytes;
  module.attr("MOST_LAYERS") = kLayers;
  module.attr("MOST_TOKENS") = kTokens - 1;
  // A layer's function that gives tokens of 16-bit values back.
  module.attr("ECHO") = reinterpret_cast<std::uintptr_t>(&echo);
  module.def("words_bytes", &Words::bytes, py::arg("ranks"), "Bytes of a channel's words.");
  module.def("request", &request_of, py::arg("layer"), py::arg("tokens"),
             "The word that asks for a layer of so many tokens.\n"
             "Raises ValueError: too many of either.");

  py::class_<Sender>(module, "Sender", "The words of a channel, as the sender of tokens uses them.")
      .def(py::init<std::uintptr_t, std::int64_t>(), py::arg("memory"), py::arg("ranks"),
           "`memory` is the address of the words, which must outlive this.")
      .def_static("addresses",
                  [](std::uintptr_t memory, std::int64_t ranks) {
                    const Words words(pointer<std::uint8_t>(memory), ranks);
                    std::vector<std::pair<std::uintptr_t, std::uintptr_t>> found;
                    for (std::int64_t rank = 0; rank < ranks; ++rank) {
                      found.emplace_back(reinterpret_cast<std::uintptr_t>(&words.request(rank)),
                                         reinterpret_cast<std::uintptr_t>(&words.answer(rank)));
                    }
                    return found;
                  },
                  py::arg("memory"), py::arg("ranks"),
                  "Addresses of each expert rank's request and answer.")
      .def("post", &Sender::post, py::arg("layer"), py::arg("tokens"),
           "Ask all expert ranks for a layer.  Raises ValueError: as `request`.")
      .def("wait", &Sender::wait, py::call_guard<py::gil_scoped_release>(),
           "Wait for all answers and take them back; whether the channel has not failed meanwhile,\n"
           "which ends the wait.")
      .def("owing", &Sender::owing,
           "Expert ranks that have a request and have not answered it: (number, answers so far).")
      .def("posting", &Sender::posting, py::arg("layer"), py::arg("tokens"),
           "`post` as a host function of a CUDA stream: (function, its argument), by address.")
      .def("waiting", &Sender::waiting, "`wait` as such.")
      .def("release", &Sender::release,
           "Say that the channel has failed, and end the wait that may be under way.")
      .def_property_readonly("has_failed", &Sender::has_failed);

  py::class_<Receiver>(module, "Receiver", "The channels of an expert rank, one for each sender.")
      .def(py::init<std::uintptr_t>(), py::arg("with_team") = 0,
           "`with_team` is the address of that function of the layers' own module, or 0.")
      .def("add", &Receiver::add, py::kw_only(), py::arg("memory"), py::arg("ranks"),
           py::arg("rank"), py::arg("connection"), py::arg("x"), py::arg("ids"),
           py::arg("weights"), py::arg("y"), py::arg("capacity"), py::arg("elements"),
           py::arg("routes"), py::arg("layers"),
           "Memory is by address, x and y of so many `elements`, ids and weights of so many\n"
           "`routes`; `connection` is a socket that can be read once the sender has ended.  A layer\n"
           "is (function, its context, hidden size, experts of a token), where function 0 leaves it\n"
           "to Python.\n"
           "Raises ValueError: `capacity` tokens of a layer are more than there is memory for.")
      .def("serve", &Receiver::serve, py::arg("limit_s"),
           "Compute what comes, for so long.  None, or (channel, layer, tokens) for Python to\n"
           "compute and to `finish`.\n"
           "Raises IndexError: the sender of the channel of that number has ended;\n"
           "RuntimeError: a layer cannot be computed.")
      .def("finish", &Receiver::finish, py::arg("channel"), "Answer what Python has computed.")
      .def_property_readonly("totals", &Receiver::totals,
                             "By name: steps and their tokens, layers, tokens times layers, experts that\n"
                             "these have read, seconds of computing, and of waiting for the next layer.");
}

// Python's face of the handover of tokens to expert ranks; its user is
// ray_hetero/distributed/expert_memory.py.

#include "receiver.h"
#include "sender.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
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

using AsLayer =
    std::tuple<std::uintptr_t, std::uintptr_t, std::int64_t, std::int64_t, std::int64_t>;

void add(Receiver& receiver, std::uintptr_t memory, std::int64_t ranks, std::int64_t rank,
         int connection, std::uintptr_t x, std::uintptr_t ids, std::uintptr_t weights,
         std::uintptr_t y, std::int64_t capacity, std::int64_t elements, std::int64_t routes,
         const std::vector<AsLayer>& layers) {
  Channel made{Words(pointer<std::uint8_t>(memory), ranks), rank, connection,
               pointer<const std::uint8_t>(x), pointer<const std::int32_t>(ids),
               pointer<const float>(weights), pointer<std::uint8_t>(y), capacity, {}, {}};
  for (const auto& [compute, context, hidden, chosen, experts] : layers) {
    made.layers.push_back({reinterpret_cast<ComputeExperts>(compute),
                           pointer<const void>(context), hidden, chosen, experts});
  }
  receiver.add(made, elements, routes);
}

py::dict by_name(const Totals& totals) {
  py::dict found;
  found["steps"] = totals.steps.load();
  found["tokens"] = totals.tokens.load();
  found["layers"] = totals.layers.load();
  found["layer_tokens"] = totals.layer_tokens.load();
  found["experts"] = totals.experts.load();
  found["computing_s"] = 1e-9 * static_cast<double>(totals.computing_ns.load());
  found["waiting_s"] = 1e-9 * static_cast<double>(totals.waiting_ns.load());
  found["slot_steps"] = totals.slot_steps.load();
  found["slot_layers"] = totals.slot_layers.load();
  found["slot_experts"] = totals.slot_experts.load();
  found["slot_computing_s"] = 1e-9 * static_cast<double>(totals.slot_computing_ns.load());
  found["slot_waiting_s"] = 1e-9 * static_cast<double>(totals.slot_waiting_ns.load());
  for (std::size_t size = 0; size < kSlotSizes; ++size) {
    const std::string percent = std::to_string(kSlotPercents[size]);
    found[("slot_hits_" + percent).c_str()] = totals.slot_hits[size].load();
    found[("slot_copies_" + percent).c_str()] = totals.slot_copies[size].load();
  }
  found["slot_held"] = totals.slot_held.load();
  return found;
}

using Counts = std::vector<std::int64_t>;  // of each book

std::pair<Counts, Counts> step_of(LayerSlots& slots, const std::vector<std::int32_t>& experts) {
  for (std::size_t i = 0; i < experts.size(); ++i) {
    const bool is_here = experts[i] >= 0 && experts[i] < slots.experts();
    if (!is_here || std::count(experts.begin(), experts.begin() + i, experts[i]) != 0) {
      throw std::invalid_argument("expected different experts below " +
                                  std::to_string(slots.experts()) + ", got " +
                                  std::to_string(experts[i]));
    }
  }
  const SlotCounts found = slots.step(experts);
  const auto of_books = [&](const auto& counts) {
    return Counts(counts.begin(), counts.begin() + slots.books());
  };
  return {of_books(found.hits), of_books(found.copies)};
}

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
      .def(py::init([](std::uintptr_t memory, std::int64_t ranks) {
             return std::make_unique<Sender>(Words(pointer<std::uint8_t>(memory), ranks));
           }),
           py::arg("memory"), py::arg("ranks"),
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
      .def("mark", &Sender::mark, py::arg("every"),
           "Say that every so many rows of the steps that follow are no drafts; 0 if that is not known.")
      .def_static("mark_address",
                  [](std::uintptr_t memory, std::int64_t ranks) {
                    const Words words(pointer<std::uint8_t>(memory), ranks);
                    return reinterpret_cast<std::uintptr_t>(&words.every());
                  },
                  py::arg("memory"), py::arg("ranks"), "Address of the word that `mark` writes.")
      .def("wait", &Sender::wait, py::call_guard<py::gil_scoped_release>(),
           "Wait for all answers and take them back; whether the channel has not failed meanwhile,\n"
           "which ends the wait.")
      .def("owing", &Sender::owing,
           "Expert ranks that have a request and have not answered it: (number, answers so far).")
      .def("posting", &Sender::posting, py::arg("layer"), py::arg("tokens"),
           "`post` as a host function of a CUDA stream: (function, its argument), by address.")
      .def("waiting", &Sender::waiting, "`wait` as such.")
      .def("make_slots",
           [](Sender& sender, std::uint32_t slots) { sender.orders().make(slots); },
           py::arg("slots"), "Say how many slots each layer has, before the first step.")
      .def("follow", [](Sender& sender, bool is_following) { sender.orders().follow(is_following); },
           py::arg("is_following"),
           "Have the book of slots, which is empty then, give orders, or go on by itself.")
      .def("take_orders", [](Sender& sender, std::uint32_t most) { return sender.orders().take(most); },
           py::arg("most"), "The oldest orders, up to so many: [layer, expert, slot].")
      .def_property_readonly("slot_sums", [](Sender& sender) { return sender.orders().told(); },
                             "Sums over the steps that were counted: steps, layers, nanoseconds of\n"
                             "computing and of waiting, experts, hits and copies of the slots' book.")
      .def("release", &Sender::release,
           "Say that the channel has failed, and end the wait that may be under way.")
      .def_property_readonly("has_failed", &Sender::has_failed);

  py::class_<Receiver>(module, "Receiver", "The channels of an expert rank, one for each sender.")
      .def(py::init([](std::uintptr_t with_team) {
             return std::make_unique<Receiver>(reinterpret_cast<WithTeam>(with_team));
           }),
           py::arg("with_team") = 0,
           "`with_team` is the address of that function of the layers' own module, or 0.")
      .def("add", &add, py::kw_only(), py::arg("memory"), py::arg("ranks"),
           py::arg("rank"), py::arg("connection"), py::arg("x"), py::arg("ids"),
           py::arg("weights"), py::arg("y"), py::arg("capacity"), py::arg("elements"),
           py::arg("routes"), py::arg("layers"),
           "Memory is by address, x and y of so many `elements`, ids and weights of so many\n"
           "`routes`; `connection` is a socket that can be read once the sender has ended.  A layer\n"
           "is (function, its context, hidden size, experts of a token, experts of the layer), where\n"
           "function 0 leaves it to Python, and 0 experts are not known.\n"
           "Raises ValueError: `capacity` tokens of a layer are more than there is memory for.")
      .def("serve", &Receiver::serve, py::arg("limit_s"), py::call_guard<py::gil_scoped_release>(),
           "Compute what comes, for so long.  None, or (channel, layer, tokens) for Python to\n"
           "compute and to `finish`.\n"
           "Raises IndexError: the sender of the channel of that number has ended;\n"
           "RuntimeError: a layer cannot be computed.")
      .def("finish", &Receiver::finish, py::arg("channel"), "Answer what Python has computed.")
      .def("keep_routes", [](Receiver& receiver) { receiver.routes().open(); },
           "Keep experts that tokens of small steps choose, for `take_routes`.")
      .def("take_routes",
           [](Receiver& receiver, bool close) {
             const auto [records, lost] = receiver.routes().take(close);
             const char* bytes = reinterpret_cast<const char*>(records.data());
             return std::make_pair(py::bytes(bytes, 2 * records.size()), lost);
           },
           py::arg("close"),
           "Records since the last call, and how many there was no room for.  A record is 16-bit\n"
           "numbers: layer, tokens, experts of each token, 65535 for none.  None follow if `close`.")
      .def_property_readonly("totals",
                             [](const Receiver& receiver) { return by_name(receiver.totals()); },
                             "By name: steps and their tokens, layers, tokens times layers, experts that\n"
                             "these have read, seconds of computing, and of waiting for the next layer; the same of\n"
                             "steps that slots are counted for, and what slots would have held and copied.");

  module.attr("SLOT_PERCENTS") = kSlotPercents;
  module.attr("COUNTED_TOKENS") = kCountedTokens;
  module.attr("SLOT_WINDOW") = kWindow;
  module.attr("SLOT_COPIES") = kCopies;
  module.attr("SLOT_ORDERS") = kOrders;
  py::class_<LayerSlots>(module, "LayerSlots", "Slots of one layer that nobody has made, of all sizes.")
      .def(py::init<std::int64_t>(), py::arg("experts"))
      .def("have", &LayerSlots::have, py::arg("slots"),
           "Keep the book of so many slots too, which are empty.")
      .def("step", &step_of, py::arg("experts"),
           "Count a step that uses these experts, each once: for each size, and for the slots of\n"
           "`have`, how many of them slots held, and how many were copied behind the step.\n"
           "Raises ValueError: an expert that there is not, or one that is given twice.");
}

// Handovers of tokens between threads that stand for processes, for ThreadSanitizer: two senders,
// two expert ranks that serve both, and of each sender the watch that ends waits.
//
//     g++ -std=c++17 -O1 -g -fsanitize=thread -Icsrc tests/native/handover_threads.cpp -o handover
//     ./handover
//
// `./handover race` has an expert rank answer before it has written its sums: a report has to come.

#include "handover/receiver.h"
#include "handover/sender.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

namespace {

using namespace ray_hetero;

constexpr std::int64_t kSenders = 2, kRanks = 2, kCapacity = 4, kHidden = 64, kChosen = 2;
constexpr int kSteps = 400;
constexpr std::int64_t kElements = kCapacity * kHidden, kRoutes = kCapacity * kChosen;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::_Exit(1);
}

// What one sender shares with all expert ranks.
struct Shared {
  alignas(128) std::uint8_t words[(2 + 3 * kRanks) * kWordBytes] = {};
  float x[kElements] = {}, weights[kRoutes] = {}, y[kRanks][kElements] = {};
  std::int32_t ids[kRoutes] = {};
  int ends[kRanks][2];
};

// Sums of an expert rank: a token times its weights and its experts.
const char* sums(const void*, const ExpertTokensAt& tokens) {
  const auto* x = static_cast<const float*>(tokens.x);
  auto* y = static_cast<float*>(tokens.y);
  for (std::int64_t token = 0; token < tokens.m; ++token) {
    float factor = 0;
    for (std::int64_t i = token * tokens.chosen; i < (token + 1) * tokens.chosen; ++i) {
      factor += tokens.weights[i] * static_cast<float>(tokens.ids[i]);
    }
    for (std::int64_t i = token * tokens.hidden; i < (token + 1) * tokens.hidden; ++i) {
      y[i] = factor * x[i];
    }
  }
  return nullptr;
}

Channel channel_of(Shared& shared, std::int64_t rank) {
  // The second layer is left to the caller, as to Python.
  return {Words(shared.words, kRanks), rank, shared.ends[rank][1],
          reinterpret_cast<const std::uint8_t*>(shared.x), shared.ids, shared.weights,
          reinterpret_cast<std::uint8_t*>(shared.y[rank]), kCapacity,
          {{&sums, nullptr, kHidden, kChosen, 8}, {nullptr, nullptr, kHidden, kChosen, 8}},
          {}};
}

// An expert rank, until a sender ends.  A third thread reads what it counts.
void serve(std::vector<Shared>& all, std::int64_t rank) {
  Receiver receiver(nullptr);
  for (Shared& shared : all) receiver.add(channel_of(shared, rank), kElements, kRoutes);
  std::atomic<bool> is_over{false};
  std::thread reporter([&] {
    std::int64_t last = 0;
    while (!is_over.load()) {
      const std::int64_t layers = receiver.totals().layers.load();
      expect(layers >= last, "counts go down");
      last = layers;
      std::this_thread::yield();
    }
  });
  try {
    while (true) {
      if (const auto asked = receiver.serve(0.01)) {
        const auto [number, layer, tokens] = *asked;
        Shared& shared = all[static_cast<std::size_t>(number)];
        expect(layer == 1, "another layer is left to the caller");
        sums(nullptr, {shared.x, shared.ids, shared.weights, shared.y[rank], tokens, kHidden,
                       kChosen});
        receiver.finish(number);
      }
    }
  } catch (const std::out_of_range&) {
    // A sender has ended.
  }
  is_over = true;
  reporter.join();
}

// Steps of a sender, each with both layers; a watch looks at what the expert ranks owe.
void send(Shared& shared, int seed) {
  const Words words(shared.words, kRanks);
  Sender sender(words);
  std::atomic<bool> is_over{false};
  std::thread watch([&] {
    while (!is_over.load()) {
      expect(sender.owing().size() <= kRanks, "more owe than there are");
      std::this_thread::yield();
    }
  });
  for (int step = 0; step < kSteps; ++step) {
    const std::int64_t tokens = 1 + (seed + step) % kCapacity;
    for (std::int64_t layer = 0; layer < 2; ++layer) {
      for (std::int64_t i = 0; i < tokens * kHidden; ++i) {
        shared.x[i] = static_cast<float>(step + i % 7);
      }
      for (std::int64_t i = 0; i < tokens * kChosen; ++i) {
        shared.ids[i] = static_cast<std::int32_t>((step + i) % 5);
        shared.weights[i] = static_cast<float>(1 + layer);
      }
      sender.post(layer, tokens);
      expect(sender.wait(), "the channel has failed");
      for (std::int64_t i = 0; i < tokens * kHidden; ++i) {
        const std::int64_t first = i / kHidden * kChosen;
        const float factor =
            static_cast<float>((1 + layer) * ((step + first) % 5 + (step + first + 1) % 5));
        for (const auto& y : shared.y) expect(y[i] == factor * shared.x[i], "wrong sums");
      }
    }
  }
  is_over = true;
  watch.join();
}

// A sender whose expert ranks are gone; its watch ends the wait.
void give_up() {
  Shared shared;
  Sender sender(Words(shared.words, kRanks));
  std::thread watch([&] {
    while (sender.owing().size() < kRanks) std::this_thread::yield();
    sender.release();
  });
  sender.post(0, 1);
  expect(!sender.wait(), "a wait that was ended looks answered");
  watch.join();
  expect(sender.has_failed(), "the channel has not failed");
}

void race() {
  Shared shared;
  const Words words(shared.words, kRanks);
  std::vector<std::thread> all;
  for (std::int64_t rank = 0; rank < kRanks; ++rank) {
    all.emplace_back([&, rank] {
      while (words.request(rank).load(std::memory_order_acquire) == 0) std::this_thread::yield();
      words.answer(rank).store(1, std::memory_order_release);
      shared.y[rank][0] = 1;
    });
  }
  Sender sender(words);
  sender.post(0, 1);
  sender.wait();
  std::printf("%g\n", static_cast<double>(shared.y[0][0] + shared.y[1][0]));
  for (std::thread& one : all) one.join();
}

}  // namespace

int main(int count, char** words) {
  if (count > 1 && std::string(words[1]) == "race") {
    race();
    return 0;
  }
  std::vector<Shared> all(kSenders);
  for (Shared& shared : all) {
    for (auto& ends : shared.ends) {
      expect(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "no socket");
    }
  }
  std::vector<std::thread> ranks, senders;
  for (std::int64_t rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] { serve(all, rank); });
  }
  for (std::int64_t number = 0; number < kSenders; ++number) {
    senders.emplace_back([&, number] {
      send(all[static_cast<std::size_t>(number)], static_cast<int>(number));
    });
  }
  for (std::thread& one : senders) one.join();
  for (Shared& shared : all) {
    for (auto& ends : shared.ends) close(ends[0]);
  }
  for (std::thread& one : ranks) one.join();
  give_up();
  std::printf("done\n");
  return 0;
}

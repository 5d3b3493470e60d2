// Decode steps and linear layers of small models on several threads, for ThreadSanitizer: of one
// rank, and of two and three ranks that add up in memory, here as threads of one process.
//
//     g++ -std=c++17 -O1 -g -fopenmp -fsanitize=thread -Icsrc -c …   (threads.cpp, csrc/kernels/levels/avx2.cpp)
//     g++ -fsanitize=thread *.o -o threads && ./threads
//
// `./threads race` has two threads write the same word: a report has to come.

#define RAY_HETERO_SMALL
#define main timed_main
#include "../../benchmarks/decode_step.cpp"
#undef main

#include "gomp_threads.h"

#include <thread>

namespace {

constexpr int kThreads = 3;

void compute_ranks(int ranks) {
  char name[] = "threads", layers[] = "2", few[] = "3x70", more[] = "9x200";
  char* words[] = {name, layers, few, more};
  const std::int64_t bytes = RankSums::needed(ranks, kStepTokens * kHidden);
  std::vector<std::uint8_t> room(static_cast<std::size_t>(bytes + 4096));
  auto* memory = room.data() + (4096 - reinterpret_cast<std::uintptr_t>(room.data()) % 4096);
  std::vector<int> names(ranks);
  std::iota(names.begin(), names.end(), 0);
  std::vector<std::thread> all;
  for (int rank = 0; rank < ranks; ++rank) {
    all.emplace_back([&, rank] {
      omp_set_num_threads(kThreads);
      if (ranks == 1) return time_steps(2, {}, 4, words);
      RankSums sums(memory, bytes, kStepTokens * kHidden, names, rank, 600.0,
                    std::vector<int>(ranks, -1));
      time_steps(2, {rank, ranks, &sums}, 4, words);
    });
  }
  for (std::thread& one : all) one.join();
}

int shared_word = 0;

}  // namespace

int main(int count, char** words) {
  if (count > 1 && std::string(words[1]) == "race") {
    std::thread other([] { ++shared_word; });
    ++shared_word;
    other.join();
    return 0;
  }
  for (const int ranks : {1, 2, 3}) compute_ranks(ranks);
  std::printf("done\n");
  return 0;
}

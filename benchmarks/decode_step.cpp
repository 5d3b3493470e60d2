// A decode step of a CPU stage's layers, 8B-shaped, in a program of its own: nothing but a compiler
// is needed.
//
//     g++ -O3 -fopenmp -std=c++17 -Icsrc -o decode_step benchmarks/decode_step.cpp csrc/kernels/levels/*.cpp
//     taskset -c 2-15 ./decode_step LAYERS REQUESTSxCONTEXT…
//     taskset -c 2-15 ./decode_step LAYERS/RANKS REQUESTSxCONTEXT…
//     WEIGHTS=fp8 taskset -c 2-15 ./decode_step …
//
// Times whole steps with compact weights, or those that WEIGHTS names, their linear layers alone, and
// plain reads of the same bytes, in turns; medians.  WEIGHTS is fp8 (blocks of 128 × 128), fp8-channel,
// int4, int4-zeros (groups of 128), int8 (per channel), mxfp4 or nvfp4.  GB/s are of weights and of
// keys and values really read.  One thread is bound to each CPU that the program may use.
//
// With RANKS as many processes share these CPUs, each with its part of every layer, and add up in
// memory that they share; the first one's times are printed.  Before come sums of 1, 32 and 128 ×
// 4096 elements alone.

#include "measuring.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>

namespace {

using namespace measuring;
using namespace ray_hetero;

#ifdef RAY_HETERO_SMALL  // tests/native/threads.cpp
constexpr long kHidden = 256, kWide = 768, kHeads = 12, kKvHeads = 6, kSize = 64;
constexpr long kBlockTokens = 32, kPositions = 512;
constexpr int kRounds = 2, kSums = 10;
#else
constexpr long kHidden = 4096, kWide = 14336, kHeads = 32, kKvHeads = 8, kSize = 128;
constexpr long kBlockTokens = 128, kPositions = 16384;
constexpr int kRounds = 15, kSums = 1000;
#endif

// bf16 between -2^-7 and 2^-7, of few exponents.
void fill(Bf16* values, long count) {
#pragma omp parallel for
  for (long i = 0; i < count; ++i) {
    const auto hash = static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15u >> 32;
    values[i] = static_cast<Bf16>((hash & 0x8000) | (0x3900 + (hash & 0x2ff)));
  }
}

// Any bytes are codes but those of NaN; bytes of 0x38 are small scales of each type.
Weight made_of_codes(const std::string& kind, long n, long k) {
  const Scaled* encoding = nullptr;  // kept until the end
  if (kind == "fp8") encoding = new Fp8(n, k, 128, ScaleType::kOneFloat);
  if (kind == "fp8-channel") encoding = new Fp8(n, k, k, ScaleType::kFloat);
  if (kind == "int4") encoding = new Int4(n, k, 128, ScaleType::kBf16, false);
  if (kind == "int4-zeros") encoding = new Int4(n, k, 128, ScaleType::kBf16, true);
  if (kind == "int8") encoding = new Int8(n, k, k, ScaleType::kFloat, false);
  if (kind == "mxfp4") encoding = new Fp4(n, k, 32, ScaleType::kE8m0, 1);
  if (kind == "nvfp4") encoding = new Fp4(n, k, 16, ScaleType::kE4m3, 1);
  if (encoding == nullptr) {
    std::printf("WEIGHTS: expected one of those that the source names, got %s\n", kind.c_str());
    std::exit(2);
  }
  const long bytes = encoding->blocks() * encoding->block_bytes();
  const long row_bytes = encoding->pairs() / 2 * encoding->block(nullptr, 0).pair_bytes;
  auto* data = allocate<std::uint8_t>(static_cast<std::size_t>(bytes));
#pragma omp parallel for
  for (long i = 0; i < bytes; ++i) {
    const auto hash = static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15u >> 40;
    // Magnitudes of a normal distribution: few codes are denormal ones.
    const auto code = static_cast<std::uint8_t>((hash & 0x80) | (0x30 + (hash & 0x3f)));
    data[i] = i % encoding->block_bytes() < row_bytes ? code : std::uint8_t{0x38};
  }
  return {data, encoding};
}

Weight made(long n, long k) {
  const char* kind = std::getenv("WEIGHTS");
  if (kind != nullptr && std::string(kind) != "compact") return made_of_codes(kind, n, k);
  auto* packed = allocate<Bf16>(static_cast<std::size_t>(n * k));
  fill(packed, n * k);
  auto* rows = allocate<std::uint8_t>(static_cast<std::size_t>(n * k * 3 / 2));
  // Kept until the end.
  auto* compact = Compact::made(packed, n, k, rows).release();
  munmap(packed, static_cast<std::size_t>(n * k) * sizeof(Bf16));
  return {rows, compact};
}

// CPUs that this process may use.
std::vector<int> usable_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) {
    std::perror("sched_getaffinity");
    std::exit(1);
  }
  std::vector<int> found;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) found.push_back(cpu);
  }
  return found;
}

// A thread on each CPU, or all of this process on one that it shares with other ranks.
void bind_threads(const std::vector<int>& cpus) {
  omp_set_num_threads(static_cast<int>(cpus.size()));
#pragma omp parallel
  {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus[omp_get_thread_num()], &set);
    if (sched_setaffinity(0, sizeof(set), &set) != 0) std::perror("sched_setaffinity");
  }
}

// Which part of the work this process has.
struct Part {
  int rank = 0, ranks = 1;
  RankSums* sums = nullptr;

  bool prints() const { return rank == 0; }
};

// Sums alone, all ranks together.
void time_sums(const Level& level, const Part& part) {
  auto* x = allocate<float>(kStepTokens * kHidden);
  auto* y = allocate<Bf16>(kStepTokens * kHidden);
  for (const long tokens : {1L, 32L, 128L}) {
    std::vector<double> seconds;
    for (int round = 0; round <= kRounds; ++round) {
      const double start = now();
      level.kernels.sum_over_ranks(*part.sums, x, tokens * kHidden, y, kSums);
      if (round > 0) seconds.push_back((now() - start) / kSums);
    }
    if (part.prints()) {
      std::printf("sums of %ld × %ld over %d ranks: %.2f µs\n", tokens, kHidden, part.ranks,
                  median(seconds) * 1e6);
    }
  }
}

void time_steps(int layers, const Part& part, int count, char** words) {
  const Level level = levels().back();
  if (part.sums != nullptr) time_sums(level, part);
  const long heads = kHeads / part.ranks, kv_heads = kKvHeads / part.ranks;
  const long wide = kWide / part.ranks, qkv = (heads + 2 * kv_heads) * kSize;
  auto* norm_weight = allocate<Bf16>(kHidden);
  auto* cos_sin = allocate<Bf16>(kPositions * kSize);
  fill(norm_weight, kHidden);
  fill(cos_sin, kPositions * kSize);
  Norm norm;
  norm.weight = norm_weight;
  norm.epsilon = 1e-5f;
  const auto qkv_input = [&] { return QkvInput{norm, {made(qkv, kHidden), nullptr}}; };
  DecoderLayers model{qkv_input(), {}};
  std::vector<Weight> weights{model.first.qkv.w};
  for (int layer = 0; layer < layers; ++layer) {
    PostAttention post_attention;
    post_attention.output = {made(kHidden, heads * kSize)};
    post_attention.norm = norm;
    post_attention.gate_up = {made(2 * wide, kHidden)};
    post_attention.down = {made(kHidden, wide)};
    post_attention.sums = part.sums;
    if (layer + 1 < layers) post_attention.next = qkv_input();
    for (const Linear* linear : {&post_attention.output, &post_attention.gate_up, &post_attention.down}) {
      weights.push_back(linear->w);
    }
    if (post_attention.next) weights.push_back(post_attention.next->qkv.w);
    const Rotation rotation{heads, kv_heads, kSize, cos_sin, kPositions, kSize, false, {}, {}};
    Scores scores;
    scores.scale = 0.088f;
    model.layers.push_back({rotation, scores, post_attention});
  }
  double weight_bytes = 0;
  for (const Weight& weight : weights) weight_bytes += double(bytes_of(weight));
  if (part.prints()) {
    std::printf("%d × %d threads, %s, %d layers, %d × %.2f GB\n", part.ranks,
                omp_get_max_threads(), level.name, layers, part.ranks, weight_bytes / 1e9);
  }
  auto* x = allocate<Bf16>(kStepTokens * kWide);
  auto* y = allocate<Bf16>(kStepTokens * 2 * kWide);
  auto* sum = allocate<Bf16>(kStepTokens * kHidden);
  fill(x, kStepTokens * kWide);
  for (int argument = 2; argument < count; ++argument) {
    char* end = nullptr;
    const long m = std::strtol(words[argument], &end, 10);
    const long context = *end == 'x' ? std::atol(end + 1) : 0;
    if (m < 1 || m > kStepTokens || context < 1 || context > kPositions) {
      std::printf("expected 1 to %ld requests and 1 to %ld tokens as REQUESTSxCONTEXT, got %s\n",
                  long{kStepTokens}, kPositions, words[argument]);
      std::exit(2);
    }
    const long blocks = (context + kBlockTokens - 1) / kBlockTokens;
    const long block_elements = 2 * kBlockTokens * kSize;
    std::vector<std::int64_t> positions(m, context - 1), slots(m);
    std::vector<std::int32_t> lengths(m, static_cast<std::int32_t>(context)), table(m * blocks);
    for (long i = 0; i < m * blocks; ++i) table[i] = static_cast<std::int32_t>(i);
    for (long i = 0; i < m; ++i) slots[i] = i * blocks * kBlockTokens + context - 1;
    const std::size_t elements = m * blocks * kv_heads * block_elements;
    std::vector<Cache> caches;
    for (int layer = 0; layer < layers; ++layer) {
      caches.push_back({allocate<Bf16>(elements), kv_heads * block_elements, block_elements, 0});
      fill(caches.back().data, static_cast<long>(elements));
    }
    const std::vector<Requests> requests{{m, positions.data(), slots.data(), lengths.data(),
                                          table.data(), blocks, kBlockTokens, Layout::kTiles}};
    const Step step{x, nullptr, y, sum};
    std::vector<double> steps, linear, reads;
    for (int round = 0; round <= kRounds; ++round) {
      double start = now();
      level.kernels.decode_step(model, caches, requests, step);
      const double stepped = now() - start;
      start = now();
      for (const Weight& w : weights) {
        level.kernels.linear(Task{x, w, nullptr, y, m, w.k()});
      }
      const double multiplied = now() - start, read = read_once(weights);
      // The first round warms up.
      if (round > 0) steps.push_back(stepped), linear.push_back(multiplied), reads.push_back(read);
    }
    const double kept = 4.0 * double(m * context * kv_heads * kSize * layers);
    const double ranks = part.ranks;
    if (part.prints()) std::printf("%-8s step %7.2f ms %6.1f GB/s   linear layers alone %7.2f ms %6.1f GB/s   "
                "plain reads %6.1f GB/s\n",
                words[argument], median(steps) * 1e3,
                ranks * (weight_bytes + kept) / median(steps) / 1e9, median(linear) * 1e3,
                ranks * weight_bytes / median(linear) / 1e9,
                ranks * weight_bytes / median(reads) / 1e9);
    std::fflush(stdout);
    for (const Cache& cache : caches) munmap(cache.data, elements * sizeof(Bf16));
  }
}

// A process for each rank, with its share of the CPUs.
int time_ranks(int layers, int ranks, int count, char** words) {
  const std::vector<int> cpus = usable_cpus();
  const long elements = kStepTokens * kHidden;
  const std::int64_t bytes = RankSums::needed(ranks, elements);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    return 1;
  }
  std::vector<int> names(ranks);
  std::iota(names.begin(), names.end(), 0);
  for (int rank = 0; rank < ranks; ++rank) {
    if (fork() != 0) continue;
    const std::size_t first = cpus.size() * rank / ranks, last = cpus.size() * (rank + 1) / ranks;
    std::vector<int> own(cpus.begin() + first, cpus.begin() + last);
    if (own.empty()) own.push_back(cpus[first]);
    bind_threads(own);
    RankSums sums(static_cast<std::uint8_t*>(memory), bytes, elements, names, rank, 600.0,
                  std::vector<int>(ranks, -1));
    time_steps(layers, {rank, ranks, &sums}, count, words);
    std::exit(0);
  }
  int failed = 0;
  for (int status = 0; wait(&status) > 0;) failed |= status;
  return failed != 0;
}

}  // namespace

int main(int count, char** words) {
  char* slash = nullptr;
  const long layers = count < 3 ? 0 : std::strtol(words[1], &slash, 10);
  const long ranks = slash != nullptr && *slash == '/' ? std::atol(slash + 1) : 1;
  if (layers < 1 || ranks < 1 || kKvHeads % ranks != 0) {
    std::printf("usage: %s LAYERS[/RANKS] REQUESTSxCONTEXT…, with 1, 2, 4 or 8 ranks\n", words[0]);
    return 2;
  }
  if (ranks > 1) {
    return time_ranks(static_cast<int>(layers), static_cast<int>(ranks), count, words);
  }
  bind_threads(usable_cpus());
  time_steps(static_cast<int>(layers), {}, count, words);
  return 0;
}

// A decode step of a CPU stage's layers, 8B-shaped, in a program of its own: nothing but a compiler
// is needed.
//
//     g++ -O3 -fopenmp -std=c++17 -Icsrc -o decode_step benchmarks/decode_step.cpp csrc/kernels/levels/*.cpp
//     OMP_NUM_THREADS=14 GOMP_CPU_AFFINITY=2-15 ./decode_step LAYERS REQUESTSxCONTEXT…
//
// Times whole steps with compact weights, their linear layers alone, and plain reads of the same
// bytes, in turns; medians.  GB/s are of weights and of keys and values really read.

#include "measuring.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

namespace {

using namespace measuring;
using namespace ray_hetero;

constexpr long kHidden = 4096, kWide = 14336, kHeads = 32, kKvHeads = 8, kSize = 128;
constexpr long kQkv = (kHeads + 2 * kKvHeads) * kSize;
constexpr long kBlockTokens = 128, kPositions = 16384;
constexpr int kRounds = 15;

// bf16 between -2^-7 and 2^-7, of few exponents.
void fill(Bf16* values, long count) {
#pragma omp parallel for
  for (long i = 0; i < count; ++i) {
    const auto hash = static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15u >> 32;
    values[i] = static_cast<Bf16>((hash & 0x8000) | (0x3900 + (hash & 0x2ff)));
  }
}

Weight made(long n, long k) {
  auto* packed = allocate<Bf16>(static_cast<std::size_t>(n * k));
  fill(packed, n * k);
  auto* rows = allocate<std::uint8_t>(static_cast<std::size_t>(n * k * 3 / 2));
  // Kept until the end.
  auto* compact = Compact::made(packed, n, k, rows).release();
  munmap(packed, static_cast<std::size_t>(n * k) * sizeof(Bf16));
  return {rows, compact};
}

}  // namespace

int main(int count, char** words) {
  if (count < 3) {
    std::printf("usage: %s LAYERS REQUESTSxCONTEXT…\n", words[0]);
    return 2;
  }
  const int layers = std::atoi(words[1]);
  const Level level = levels().back();
  auto* norm_weight = allocate<Bf16>(kHidden);
  auto* cos_sin = allocate<Bf16>(kPositions * kSize);
  fill(norm_weight, kHidden);
  fill(cos_sin, kPositions * kSize);
  const Norm norm{norm_weight, 1e-5f};
  const auto qkv_input = [&] { return QkvInput{norm, {made(kQkv, kHidden), nullptr}}; };
  DecoderLayers model{qkv_input(), {}};
  std::vector<Weight> weights{model.first.qkv.w};
  for (int layer = 0; layer < layers; ++layer) {
    PostAttention post_attention{{made(kHidden, kHeads * kSize)}, norm, {made(2 * kWide, kHidden)},
                    {made(kHidden, kWide)}, {}};
    if (layer + 1 < layers) post_attention.next = qkv_input();
    for (const Linear* linear : {&post_attention.output, &post_attention.gate_up, &post_attention.down}) {
      weights.push_back(linear->w);
    }
    if (post_attention.next) weights.push_back(post_attention.next->qkv.w);
    const Rotation rotation{kHeads, kKvHeads, kSize, cos_sin, kPositions, kSize, {}, {}};
    model.layers.push_back({rotation, 0.088f, post_attention});
  }
  double weight_bytes = 0;
  for (const Weight& weight : weights) weight_bytes += 1.5 * double(weight.n()) * double(weight.k());
  std::printf("%d threads, %s, %d layers, %.2f GB\n", omp_get_max_threads(),
              level.name, layers, weight_bytes / 1e9);
  auto* x = allocate<Bf16>(kFewTokens * kWide);
  auto* y = allocate<Bf16>(kFewTokens * 2 * kWide);
  auto* sum = allocate<Bf16>(kFewTokens * kHidden);
  fill(x, kFewTokens * kWide);
  for (int argument = 2; argument < count; ++argument) {
    char* end = nullptr;
    const long m = std::strtol(words[argument], &end, 10), context = std::atol(end + 1);
    const long blocks = (context + kBlockTokens - 1) / kBlockTokens;
    const long block_elements = 2 * kBlockTokens * kSize;
    std::vector<std::int64_t> positions(m, context - 1), slots(m);
    std::vector<std::int32_t> lengths(m, static_cast<std::int32_t>(context)), table(m * blocks);
    for (long i = 0; i < m * blocks; ++i) table[i] = static_cast<std::int32_t>(i);
    for (long i = 0; i < m; ++i) slots[i] = i * blocks * kBlockTokens + context - 1;
    const std::size_t elements = m * blocks * kKvHeads * block_elements;
    std::vector<Cache> caches;
    for (int layer = 0; layer < layers; ++layer) {
      caches.push_back({allocate<Bf16>(elements), kKvHeads * block_elements, block_elements});
      fill(caches.back().data, static_cast<long>(elements));
    }
    const Requests requests{m, positions.data(), slots.data(), lengths.data(), table.data(), blocks,
                            kBlockTokens, Layout::kTiles};
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
    const double kept = 4.0 * double(m * context * kKvHeads * kSize * layers);
    std::printf("%-8s step %7.2f ms %6.1f GB/s   linear layers alone %7.2f ms %6.1f GB/s   "
                "plain reads %6.1f GB/s\n",
                words[argument], median(steps) * 1e3, (weight_bytes + kept) / median(steps) / 1e9,
                median(linear) * 1e3, weight_bytes / median(linear) / 1e9,
                weight_bytes / median(reads) / 1e9);
    std::fflush(stdout);
    for (const Cache& cache : caches) munmap(cache.data, elements * sizeof(Bf16));
  }
  return 0;
}

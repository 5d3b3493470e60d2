// Bandwidth of the streaming linear kernel on the weights of 8B-shaped layers, in a program of its
// own: nothing but a compiler is needed.
//
//     g++ -O3 -fopenmp -std=c++17 -Icsrc -o streaming_linear benchmarks/streaming_linear.cpp csrc/kernels/levels/*.cpp
//     OMP_NUM_THREADS=14 GOMP_CPU_AFFINITY=2-15 ./streaming_linear LAYERS TOKENS…
//
// First every kernel's outputs are compared with plain sums, then each number of tokens is timed:
// median of several rounds over all layers, packed and compact, at each level of this processor,
// beside plain reads of the packed weights.  GB/s are of bytes really read.

#include "measuring.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace {

using ray_hetero::Task;
using namespace measuring;

constexpr int kRounds = 7;
constexpr long kMostTokens = 1024;

struct Layer {
  long n, k;
  Bf16* packed;
  std::uint8_t* rows;  // compact
  std::unique_ptr<ray_hetero::Compact> compact;
  std::unique_ptr<ray_hetero::Packed> plain;

  ray_hetero::Weight weight(bool is_compact) const {
    if (is_compact) return {rows, compact.get()};
    return {reinterpret_cast<const std::uint8_t*>(packed), plain.get()};
  }
};

struct Way {
  std::string name;
  bool is_compact;
  ray_hetero::Level level;

  double bytes(double elements) const { return elements * (is_compact ? 1.5 : 2.0); }
};

float to_float(Bf16 value) {
  const std::uint32_t bits = std::uint32_t(value) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof(number));
  return number;
}

Bf16 to_bf16(float number) {
  std::uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return static_cast<Bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Deterministic numbers between -size and size.
Bf16 number(std::uint64_t at, float size) {
  return to_bf16(static_cast<float>(at * 2654435761u >> 8 & 1023) / 512.0f * size - size);
}

// Deterministic, and about as often near 0 as trained weights.
Bf16 weight(std::uint64_t at) {
  float sum = 0;
  for (int i = 0; i < 4; ++i, at += 0x9e3779b9u) sum += to_float(number(at * at >> 3, 0.01f));
  return to_bf16(sum);
}

std::vector<Layer> make_layers(int layers) {
  constexpr long kShapes[4][2] = {{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}};
  std::vector<Layer> made;
  for (int layer = 0; layer < layers; ++layer) {
    for (const auto& shape : kShapes) {
      const long count = shape[0] * shape[1];
      auto* packed = allocate<Bf16>(static_cast<std::size_t>(count));
#pragma omp parallel for
      for (long i = 0; i < count; ++i) packed[i] = weight(static_cast<std::uint64_t>(i));
      auto* rows = allocate<std::uint8_t>(static_cast<std::size_t>(count * 3 / 2));
      made.push_back({shape[0], shape[1], packed, rows,
                      ray_hetero::Compact::made(packed, shape[0], shape[1], rows),
                      std::make_unique<ray_hetero::Packed>(shape[0], shape[1])});
    }
  }
  return made;
}

Task task_of(const Layer& layer, const Bf16* x, Bf16* y, long tokens, const Way& way) {
  return {x, layer.weight(way.is_compact), nullptr, y, tokens, layer.k};
}

float plain_sum(const Layer& layer, const Bf16* x, long token, long output) {
  double sum = 0;
  for (long k = 0; k < layer.k; ++k) {
    const long row = output / 32 * (layer.k / 2) + k / 2;
    const Bf16 value = layer.packed[row * 64 + output % 32 * 2 + k % 2];
    sum += to_float(x[token * layer.k + k]) * to_float(value);
  }
  return static_cast<float>(sum);
}

bool is_right(const Layer& layer, const Bf16* x, Bf16* y, long tokens, const Way& way) {
  std::memset(y, 0xff, sizeof(Bf16) * static_cast<std::size_t>(tokens * layer.n));
  way.level.kernels.linear(task_of(layer, x, y, tokens, way));
  float worst = 0, largest = 0;
  for (long sample = 0; sample < 200; ++sample) {
    const long token = sample % 3 == 0 ? tokens - 1 : sample * 37 % tokens;
    const long output = sample * 7907 % layer.n;
    const float expected = plain_sum(layer, x, token, output);
    const float error = std::fabs(expected - to_float(y[token * layer.n + output]));
    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
    largest = std::max(largest, std::fabs(expected));
  }
  // One rounding to bf16, 8 bits.
  if (worst < largest / 200) return true;
  std::printf("WRONG: %s, %ld tokens, [%ld, %ld]: off by %g of %g\n", way.name.c_str(), tokens, layer.n,
              layer.k, double(worst), double(largest));
  return false;
}

void show(const std::string& what, double bytes, std::vector<double> seconds) {
  const double typical = median(std::move(seconds));
  std::printf("%-30s %8.2f ms %7.1f GB/s\n", what.c_str(), typical * 1e3, bytes / typical / 1e9);
  std::fflush(stdout);
}

}  // namespace

int main(int count, char** words) {
  if (count < 3) {
    std::printf("usage: %s LAYERS TOKENS…\n", words[0]);
    return 2;
  }
  std::vector<Way> ways;
  for (const ray_hetero::Level& level : ray_hetero::levels()) {
    const std::string name = level.name;
    // These are for tests of what is computed.
    if (name == "portable" || name == "software_tiles") continue;
    ways.push_back({"packed, " + name, false, level});
    ways.push_back({"compact, " + name, true, level});
  }
  const std::vector<Layer> layers = make_layers(std::atoi(words[1]));
  double elements = 0;
  std::vector<ray_hetero::Weight> packed;
  for (const Layer& layer : layers) {
    elements += double(layer.n) * double(layer.k);
    packed.push_back(layer.weight(false));
  }
  auto* x = allocate<Bf16>(kMostTokens * 14336);
  auto* y = allocate<Bf16>(kMostTokens * 28672);
  for (long i = 0; i < kMostTokens * 14336; ++i) x[i] = number(static_cast<std::uint64_t>(i), 1);
  bool right = true;
  for (const Way& way : ways) {
    for (long tokens : {1, 5, 16, 17, 32, 33, 100, 513, 1024}) {
      if (tokens > 100 && !way.level.kernels.has_tiles) break;
      for (int layer = 0; layer < 4; ++layer) {
        right &= is_right(layers[layer], x, y, tokens, way);
      }
    }
  }
  std::printf("%d threads, outputs are %s\n", omp_get_max_threads(),
              right ? "those of plain sums" : "WRONG");
  for (int argument = 2; argument < count; ++argument) {
    const long tokens = std::min(std::atol(words[argument]), kMostTokens);
    std::vector<double> reads;
    std::vector<std::vector<double>> runs(ways.size());
    // In turns; the first round warms up.
    for (int round = 0; round <= kRounds; ++round) {
      const double read = read_once(packed);
      if (round > 0) reads.push_back(read);
      for (std::size_t way = 0; way < ways.size(); ++way) {
        const double start = now();
        for (const Layer& layer : layers) {
          ways[way].level.kernels.linear(task_of(layer, x, y, tokens, ways[way]));
        }
        if (round > 0) runs[way].push_back(now() - start);
      }
    }
    show("plain reads", 2.0 * elements, reads);
    for (std::size_t way = 0; way < ways.size(); ++way) {
      show(std::to_string(tokens) + " tokens, " + ways[way].name, ways[way].bytes(elements),
           runs[way]);
    }
  }
  return right ? 0 : 1;
}

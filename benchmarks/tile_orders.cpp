// Orders in which AMX tiles of tokens and of weights are loaded and multiplied, each by itself.
//
//     g++ -O3 -fopenmp -std=c++17 -Icsrc -o tile_orders benchmarks/tile_orders.cpp
//     OMP_NUM_THREADS=14 GOMP_CPU_AFFINITY=2-15 ./tile_orders
//
// A step multiplies 32 tokens with 32 outputs, of 32 inputs: four products of tiles.  Tiles come from
// memory of as many KiB as a line says, of tokens and of weights, over and over; 8 KiB of weights are a
// piece of csrc/kernels/pieces.h.  Every so many steps the sums are stored, and those of other tokens
// are loaded.  Each thread has its own memory; a line is the median over threads of the shortest of
// several rounds, in nanoseconds a step.  Results are compared first; with
// -DRAY_HETERO_SOFTWARE_TILES that is all that can be learned, on processors without AMX too.

#include "kernels/formats/rows.h"
#include "kernels/processor.h"
#include "kernels/tile_config.h"
#include "measuring.h"

#include <omp.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#define RAY_HETERO_LEVEL tile_orders
#ifdef RAY_HETERO_SOFTWARE_TILES
namespace ray_hetero::tile_orders {
using ray_hetero::as_float;
}
#include "kernels/tiles/software.h"
#else
#include "kernels/tiles/amx.h"
#endif

namespace {

using namespace ray_hetero;
using namespace ray_hetero::tile_orders;
using measuring::Bf16;

constexpr long kTokens = 32;
constexpr long kStepValues = 2 * kTile * 2 * kTile;  // of tokens, and of weights: two tiles
constexpr long kStepBytes = kStepValues * sizeof(Bf16);
constexpr long kSumValues = kTokens * kBlock;
constexpr long kGroups = 4;  // of tokens, which have sums of their own
#ifdef RAY_HETERO_SOFTWARE_TILES
constexpr bool kIsSoftware = true;
#else
constexpr bool kIsSoftware = false;
#endif
constexpr long kRounds = kIsSoftware ? 1 : 9;
constexpr long kSteps = kIsSoftware ? 64 : 1 << 14;  // of a round; a multiple of all others

struct Given {
  const Bf16* x;  // [token_steps][2][16][32]
  long token_steps;  // a power of two, as a division takes as long as a product
  const Bf16* w;  // [weight_steps][16][32][2]
  long weight_steps;  // the same
  float* sums;  // [kGroups][32][32]

  const Bf16* tokens(long step) const { return x + (step & (token_steps - 1)) * kStepValues; }
  const Bf16* weights(long step) const { return w + (step & (weight_steps - 1)) * kStepValues; }
};

constexpr long kTokenBytes = 2 * kTile * sizeof(Bf16);
constexpr long kSumBytes = kBlock * sizeof(float);

template <int kTileNumber>
RAY_HETERO_INLINE void load_x(const Given& given, long step, int which) {
  load_tile<kTileNumber>(given.tokens(step) + which * kTile * 2 * kTile, kTokenBytes);
}
template <int kTileNumber>
RAY_HETERO_INLINE void load_w(const Given& given, long step, int half) {
  load_tile<kTileNumber>(given.weights(step) + half * kBlock, kRowBytes);
}

RAY_HETERO_INLINE void load_four(const float* sums) {
  load_tile<0>(sums, kSumBytes);
  load_tile<1>(sums + kTile, kSumBytes);
  load_tile<2>(sums + kTile * kBlock, kSumBytes);
  load_tile<3>(sums + kTile * kBlock + kTile, kSumBytes);
}
RAY_HETERO_INLINE void store_four(float* sums) {
  store_tile<0>(sums, kSumBytes);
  store_tile<1>(sums + kTile, kSumBytes);
  store_tile<2>(sums + kTile * kBlock, kSumBytes);
  store_tile<3>(sums + kTile * kBlock + kTile, kSumBytes);
}

// As multiply() of csrc/kernels/tiles.h: loads just before their products.
void just_before(const Given& given, long begin, long end, float* sums) {
  load_four(sums);
  for (long step = begin; step < end; ++step) {
    load_w<6>(given, step, 0);
    load_w<7>(given, step, 1);
    load_x<4>(given, step, 0);
    multiply_tiles<0, 4, 6>();
    multiply_tiles<1, 4, 7>();
    load_x<5>(given, step, 1);
    multiply_tiles<2, 5, 6>();
    multiply_tiles<3, 5, 7>();
  }
  store_four(sums);
}

// The operands of a first step, in the order in which these ways need them, and the sums.
RAY_HETERO_INLINE void load_first(const Given& given, long step, const float* sums) {
  load_w<6>(given, step, 0);
  load_x<4>(given, step, 0);
  load_x<5>(given, step, 1);
  load_w<7>(given, step, 1);
  load_four(sums);
}

// Each tile is loaded anew right behind its last product, for the next step.
void behind_last_use(const Given& given, long begin, long end, float* sums) {
  load_first(given, begin, sums);
  for (long step = begin; step < end; ++step) {
    multiply_tiles<0, 4, 6>();
    multiply_tiles<2, 5, 6>();
    load_w<6>(given, step + 1, 0);
    multiply_tiles<1, 4, 7>();
    load_x<4>(given, step + 1, 0);
    multiply_tiles<3, 5, 7>();
    load_x<5>(given, step + 1, 1);
    load_w<7>(given, step + 1, 1);
  }
  store_four(sums);
}

// The same, where the order of products alternates: what was loaded last is needed last.
void alternating(const Given& given, long begin, long end, float* sums) {
  load_first(given, begin, sums);
  for (long step = begin; step < end; step += 2) {
    multiply_tiles<0, 4, 6>();
    multiply_tiles<2, 5, 6>();
    load_w<6>(given, step + 1, 0);
    multiply_tiles<1, 4, 7>();
    load_x<4>(given, step + 1, 0);
    multiply_tiles<3, 5, 7>();
    load_w<7>(given, step + 1, 1);
    load_x<5>(given, step + 1, 1);
    multiply_tiles<0, 4, 6>();
    multiply_tiles<1, 4, 7>();
    load_x<4>(given, step + 2, 0);
    multiply_tiles<2, 5, 6>();
    load_w<6>(given, step + 2, 0);
    multiply_tiles<3, 5, 7>();
    load_x<5>(given, step + 2, 1);
    load_w<7>(given, step + 2, 1);
  }
  store_four(sums);
}

// 16 tokens after the other 16, whose operands have two sets of tiles.
template <int kSet>
RAY_HETERO_INLINE void load_set(const Given& given, long step, int which) {
  load_w<kSet == 0 ? 6 : 2>(given, step, 0);
  load_w<kSet == 0 ? 7 : 3>(given, step, 1);
  load_x<kSet == 0 ? 4 : 5>(given, step, which);
}
void two_sets(const Given& given, long begin, long end, float* sums) {
  for (int which = 0; which < 2; ++which, sums += kTile * kBlock) {
    load_set<0>(given, begin, which);
    load_tile<0>(sums, kSumBytes), load_tile<1>(sums + kTile, kSumBytes);
    for (long step = begin; step < end; step += 2) {
      load_set<1>(given, step + 1, which);
      multiply_tiles<0, 4, 6>();
      multiply_tiles<1, 4, 7>();
      load_set<0>(given, step + 2, which);
      multiply_tiles<0, 5, 2>();
      multiply_tiles<1, 5, 3>();
    }
    store_tile<0>(sums, kSumBytes), store_tile<1>(sums + kTile, kSumBytes);
  }
}

// The same, in which the loads of one set lie between the products of the other.
void two_sets_mixed(const Given& given, long begin, long end, float* sums) {
  for (int which = 0; which < 2; ++which, sums += kTile * kBlock) {
    load_set<0>(given, begin, which);
    load_set<1>(given, begin + 1, which);
    load_tile<0>(sums, kSumBytes), load_tile<1>(sums + kTile, kSumBytes);
    for (long step = begin; step < end; step += 2) {
      multiply_tiles<0, 4, 6>();
      load_w<6>(given, step + 2, 0);
      multiply_tiles<1, 4, 7>();
      load_x<4>(given, step + 2, which);
      load_w<7>(given, step + 2, 1);
      multiply_tiles<0, 5, 2>();
      load_w<2>(given, step + 3, 0);
      multiply_tiles<1, 5, 3>();
      load_x<5>(given, step + 3, which);
      load_w<3>(given, step + 3, 1);
    }
    store_tile<0>(sums, kSumBytes), store_tile<1>(sums + kTile, kSumBytes);
  }
}

// One half of the outputs after the other, so that tokens and weights have two sets each.
void halves(const Given& given, long begin, long end, float* sums) {
  for (int half = 0; half < 2; ++half, sums += kTile) {
    load_x<2>(given, begin, 0), load_x<3>(given, begin, 1), load_w<6>(given, begin, half);
    load_x<4>(given, begin + 1, 0), load_x<5>(given, begin + 1, 1);
    load_w<7>(given, begin + 1, half);
    load_tile<0>(sums, kSumBytes), load_tile<1>(sums + kTile * kBlock, kSumBytes);
    for (long step = begin; step < end; step += 2) {
      multiply_tiles<0, 2, 6>();
      load_x<2>(given, step + 2, 0);
      multiply_tiles<1, 3, 6>();
      load_x<3>(given, step + 2, 1);
      load_w<6>(given, step + 2, half);
      multiply_tiles<0, 4, 7>();
      load_x<4>(given, step + 3, 0);
      multiply_tiles<1, 5, 7>();
      load_x<5>(given, step + 3, 1);
      load_w<7>(given, step + 3, half);
    }
    store_tile<0>(sums, kSumBytes), store_tile<1>(sums + kTile * kBlock, kSumBytes);
  }
}

// Without loads: what the products alone take.
void products_alone(const Given& given, long begin, long end, float* sums) {
  load_first(given, begin, sums);
  for (long step = begin; step < end; ++step) {
    multiply_tiles<0, 4, 6>();
    multiply_tiles<1, 4, 7>();
    multiply_tiles<2, 5, 6>();
    multiply_tiles<3, 5, 7>();
  }
  store_four(sums);
}

// Without products: what the loads alone take.
void loads_alone(const Given& given, long begin, long end, float* sums) {
  load_four(sums);
  for (long step = begin; step < end; ++step) {
    load_w<6>(given, step, 0);
    load_w<7>(given, step, 1);
    load_x<4>(given, step, 0);
    load_x<5>(given, step, 1);
  }
  store_four(sums);
}

struct Way {
  const char* name;
  void (*run)(const Given&, long, long, float*);
  bool is_whole;  // whether its results are products
};
constexpr Way kWays[] = {
    {"products alone", products_alone, false},
    {"loads alone", loads_alone, false},
    {"loads just before", just_before, true},
    {"loads behind the last use", behind_last_use, true},
    {"the same, alternating", alternating, true},
    {"two sets of 16 tokens", two_sets, true},
    {"the same, mixed", two_sets_mixed, true},
    {"two sets of 16 outputs", halves, true},
};

struct Setting {
  long token_kib, weight_kib;
  long every;  // steps between two of which sums are stored and loaded
};
constexpr Setting kSettings[] = {
    {16, 8, 64}, {512, 8, 64}, {512, 8, 8}, {512, 8, 4}, {256, 16, 8}, {256, 256, 64}, {1024, 8, 4},
};

Bf16 value(long at) {
  const auto number = static_cast<float>((at * 7919 % 256) - 128) / 1024;
  std::uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return static_cast<Bf16>(bits >> 16);
}

void run(const Way& way, const Given& given, long steps, long every) {
  long group = 0;
  for (long begin = 0; begin < steps; begin += every, ++group) {
    way.run(given, begin, begin + every, given.sums + group % kGroups * kSumValues);
  }
}

// Shortest round of a thread, in nanoseconds a step.
double measured(const Way& way, const Given& given, long every) {
  double best = 1e9;
  for (long round = 0; round < kRounds; ++round) {
    const double began = measuring::now();
    run(way, given, kSteps, every);
    best = std::min(best, (measuring::now() - began) * 1e9 / kSteps);
  }
  return best;
}

// Whether a way adds the same to the sums as the first one that is whole.
bool is_right(const Way& way, Given given, long every) {
  constexpr long kAll = kGroups * kSumValues, kSome = 64;
  std::vector<float> sums[2];
  for (std::vector<float>& one : sums) {
    one.assign(kAll, 0.5f);
    given.sums = one.data();
    run(&one == sums ? kWays[2] : way, given, kSome, every);
  }
  for (long at = 0; at < kAll; ++at) {
    if (std::abs(sums[0][at] - sums[1][at]) > 1e-4f) return false;
  }
  return true;
}

}  // namespace

int main() {
  if (!kIsSoftware && !has_amx()) {
    std::puts("this processor or system has no AMX-BF16");
    return 1;
  }
  const int most = omp_get_max_threads();
  for (const int threads : {1, most}) {
    for (const Setting& setting : kSettings) {
      const long token_steps = setting.token_kib * 1024 / kStepBytes;
      const long weight_steps = setting.weight_kib * 1024 / kStepBytes;
      std::printf("%d threads, %ld KiB of tokens, %ld of weights, sums every %ld steps\n", threads,
                  setting.token_kib, setting.weight_kib, setting.every);
      for (const Way& way : kWays) {
        std::vector<double> found(threads);
        std::vector<int> is_wrong(threads);
#pragma omp parallel num_threads(threads)
        {
          Bf16* x = measuring::allocate<Bf16>(token_steps * kStepValues);
          Bf16* w = measuring::allocate<Bf16>(weight_steps * kStepValues);
          float* sums = measuring::allocate<float>(kGroups * kSumValues);
          for (long at = 0; at < token_steps * kStepValues; ++at) x[at] = value(at);
          for (long at = 0; at < weight_steps * kStepValues; ++at) w[at] = value(3 * at + 1);
          std::fill_n(sums, kGroups * kSumValues, 0.0f);
          const Given given{x, token_steps, w, weight_steps, sums};
          set_tiles(TileConfig(kTokens));
          const int thread = omp_get_thread_num();
          is_wrong[thread] = way.is_whole && !is_right(way, given, setting.every);
#pragma omp barrier
          found[thread] = measured(way, given, setting.every);
          release_tiles();
        }
        if (std::count(is_wrong.begin(), is_wrong.end(), 0) != threads) {
          return std::printf("%s multiplies something else\n", way.name), 1;
        }
        std::sort(found.begin(), found.end());
        std::printf("    %-26s %7.1f\n", way.name, found[threads / 2]);
        std::fflush(stdout);
      }
    }
  }
}

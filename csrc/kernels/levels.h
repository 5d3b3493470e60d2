// The kernels, compiled for several levels of a processor's instruction sets.
//
// There is one source: level.h includes few_tokens.h, attention.h, …, and each file of levels/ includes
// it once, in a namespace of its own and compiled for its instructions, over the vectors and tiles
// that the level has.
//
// Weights and activations are bf16.  The same source over vectors that read and write float16 in its
// place computes models in that type (RAY_HETERO_IS_HALF): products and sums are float32 in both.
//
// One level's results depend neither on the number of threads nor on chance.  Those of two levels
// differ by the order and the rounding of sums in float32: for a sum of K products w · x by at most
// 2 · K · 2^-24 · Σ |w · x|, and by what this changes in later rounding.

#pragma once

#include "kernels.h"
#include "processor.h"

#include <vector>

namespace ray_hetero {

// A build may leave levels out (setup.py, RAY_HETERO_LEVELS); their addresses are null then.
#define RAY_HETERO_LEVEL(name)                         \
  namespace name {                                     \
  __attribute__((weak)) const Kernels& kernels();      \
  }
RAY_HETERO_LEVEL(software_tiles)
RAY_HETERO_LEVEL(portable)
RAY_HETERO_LEVEL(avx2)
RAY_HETERO_LEVEL(avx512)
RAY_HETERO_LEVEL(avx512_bf16)
RAY_HETERO_LEVEL(amx)
RAY_HETERO_LEVEL(half_portable)
RAY_HETERO_LEVEL(half_avx2)
RAY_HETERO_LEVEL(half_avx512)
#undef RAY_HETERO_LEVEL

// A set of instructions that kernels are compiled for.
struct Level {
  const char* name;
  const Kernels& kernels;
};

struct KnownLevel {
  const char* name;
  bool (*is_here)();
  const Kernels& (*kernels)();
};

// Those of some that this process may use.
template <typename All>
std::vector<Level> levels_of(const All& all) {
  std::vector<Level> found;
  for (const KnownLevel& level : all) {
    if (level.kernels != nullptr && level.is_here()) found.push_back({level.name, level.kernels()});
  }
  return found;
}

// Those that this process may use, from those for tests to the best.
inline std::vector<Level> levels() {
  static const KnownLevel all[] = {
      {"software_tiles", [] { return true; }, software_tiles::kernels},
      {"portable", [] { return true; }, portable::kernels},
#if defined(__x86_64__)
      {"avx2", has_avx2, avx2::kernels},
      {"avx512", has_avx512, avx512::kernels},
      {"avx512_bf16", has_avx512_bf16, avx512_bf16::kernels},
      {"amx", has_amx, amx::kernels},
#endif
  };
  return levels_of(all);
}

// The same of those whose weights and activations are float16: packed weights only.
inline std::vector<Level> half_levels() {
  static const KnownLevel all[] = {
      {"half_portable", [] { return true; }, half_portable::kernels},
#if defined(__x86_64__)
      {"half_avx2", has_avx2, half_avx2::kernels},
      {"half_avx512", has_avx512, half_avx512::kernels},
#endif
  };
  return levels_of(all);
}

}  // namespace ray_hetero

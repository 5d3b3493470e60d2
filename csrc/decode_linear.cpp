// y = x · Wᵀ + b for a few tokens in bf16, at the speed at which the socket reads W.
//
// A decode step reads every weight once for a handful of tokens, so the only thing that counts is
// that all threads stream their share of W without a pause.  W is in the layout of vLLM's packed
// kernels, [N / 32][K / 2][32][2]: a row of 128 bytes holds two k of 32 outputs, which is what both
// VDPBF16PS and TDPBF16PS multiply.  The rows of all blocks are shared out evenly, whatever N is;
// where threads share a block, their partial sums are added up at the end.
//
// ray_hetero/decode_linear.py is the typed face of this module.

#include <omp.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define RAY_HETERO_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define RAY_HETERO_AMX __attribute__((target("avx512f,amx-tile,amx-bf16")))
#endif

namespace py = pybind11;

namespace {

constexpr int kBlock = 32;           // outputs of a block
constexpr int kTile = 16;            // tokens, outputs and pairs of k of an AMX tile
constexpr std::int64_t kRows = 512;  // rows that all groups of tokens use before the next are read
constexpr std::int64_t kGrain = 32;  // rows; shares begin on pages
constexpr std::int64_t kFar = 64;    // rows between a load and its prefetch into the second level
constexpr std::int64_t kNear = 16;   // … and into the first, whose fill buffers are few

struct Task {
  const std::uint16_t* x;     // [m][stride] bf16; for AMX tiles [k / 32][m][32]
  const std::uint16_t* w;     // packed, bf16
  const float* bias;          // [n], or nullptr
  std::uint16_t* y;           // [m][n] bf16
  std::int64_t m, n, pairs, stride;
  bool use_amx;
};

// The part of a block that one thread has summed up; a thread has two at most.
struct Partial {
  std::int64_t block = -1;
  std::vector<float> sums;  // [m][kBlock]
};

#if defined(__x86_64__)

// The hardware's prefetcher stops at the end of each page, and tile loads hardly set it off.
inline void prefetch_line(const std::uint16_t* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at + kFar * 2 * kBlock), _MM_HINT_T1);
  _mm_prefetch(reinterpret_cast<const char*>(at + kNear * 2 * kBlock), _MM_HINT_T0);
}

// ---- AVX-512: sums of up to kGroup tokens stay in registers, two for each token -----------------

constexpr int kGroup = 8;

template <int M>
RAY_HETERO_BF16 void add_rows(const std::uint16_t* x, std::int64_t stride, const std::uint16_t* w,
                              std::int64_t rows, float* sums) {
  __m512 low[M], high[M];
  for (int i = 0; i < M; ++i) {
    low[i] = _mm512_loadu_ps(sums + i * kBlock);
    high[i] = _mm512_loadu_ps(sums + i * kBlock + kTile);
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::uint16_t* at = w + row * 2 * kBlock;
    prefetch_line(at);
    prefetch_line(at + kBlock);
    const auto left = (__m512bh)_mm512_loadu_si512(at);
    const auto right = (__m512bh)_mm512_loadu_si512(at + kBlock);
    for (int i = 0; i < M; ++i) {
      std::int32_t pair;
      __builtin_memcpy(&pair, x + i * stride + 2 * row, sizeof(pair));
      const auto both = (__m512bh)_mm512_set1_epi32(pair);
      low[i] = _mm512_dpbf16_ps(low[i], left, both);
      high[i] = _mm512_dpbf16_ps(high[i], right, both);
    }
  }
  for (int i = 0; i < M; ++i) {
    _mm512_storeu_ps(sums + i * kBlock, low[i]);
    _mm512_storeu_ps(sums + i * kBlock + kTile, high[i]);
  }
}

using AddRows = void (*)(const std::uint16_t*, std::int64_t, const std::uint16_t*, std::int64_t,
                         float*);
constexpr AddRows kAddRows[kGroup + 1] = {
    nullptr,     add_rows<1>, add_rows<2>, add_rows<3>, add_rows<4>,
    add_rows<5>, add_rows<6>, add_rows<7>, add_rows<8>,
};

void add_rows_avx(const Task& task, std::int64_t row, const std::uint16_t* w, std::int64_t rows,
                  float* sums) {
  for (std::int64_t token = 0; token < task.m; token += kGroup) {
    const auto group = std::min<std::int64_t>(kGroup, task.m - token);
    kAddRows[group](task.x + token * task.stride + 2 * row, task.stride, w, rows,
                    sums + token * kBlock);
  }
}

// ---- AMX: two tiles of tokens times the two halves of a block -----------------------------------

// The intrinsics want literal numbers: tiles 0 to 3 are sums, 4 and 5 tokens, 6 and 7 weights.

// Operand of LDTILECFG, Intel SDM volume 1, table 18-2.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t bytes_per_row[16] = {};
  std::uint8_t rows[16] = {};

  // For `tokens` in one or two tiles.
  explicit TileConfig(std::int64_t tokens) {
    const auto first = static_cast<std::uint8_t>(std::min<std::int64_t>(tokens, kTile));
    const auto second = static_cast<std::uint8_t>(tokens - first);
    const std::uint8_t heights[8] = {first, first, second, second, first, second, kTile, kTile};
    for (int tile = 0; tile < 8; ++tile) {
      rows[tile] = heights[tile];
      bytes_per_row[tile] = heights[tile] ? 64 : 0;
    }
  }
};

// x is at this group's first token: tiles of [tokens][32], `step` elements from one k to the next.
template <bool kTwo>
RAY_HETERO_AMX void add_tiles(const std::uint16_t* x, std::int64_t step, const std::uint16_t* w,
                              std::int64_t rows, float* sums) {
  constexpr int kSumStride = kBlock * sizeof(float);
  constexpr int kRowStride = 2 * kBlock * sizeof(std::uint16_t);
  constexpr int kTokenStride = 2 * kTile * sizeof(std::uint16_t);
  _tile_loadd(0, sums, kSumStride);
  _tile_loadd(1, sums + kTile, kSumStride);
  if constexpr (kTwo) {
    _tile_loadd(2, sums + kTile * kBlock, kSumStride);
    _tile_loadd(3, sums + kTile * kBlock + kTile, kSumStride);
  }
  for (std::int64_t row = 0; row < rows; row += kTile) {
    const std::uint16_t* at = w + row * 2 * kBlock;
    for (int line = 0; line < 2 * kTile; ++line) prefetch_line(at + line * kBlock);
    _tile_loadd(6, at, kRowStride);
    _tile_loadd(7, at + kBlock, kRowStride);
    _tile_loadd(4, x, kTokenStride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwo) {
      _tile_loadd(5, x + kTile * 2 * kTile, kTokenStride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    x += step;
  }
  _tile_stored(0, sums, kSumStride);
  _tile_stored(1, sums + kTile, kSumStride);
  if constexpr (kTwo) {
    _tile_stored(2, sums + kTile * kBlock, kSumStride);
    _tile_stored(3, sums + kTile * kBlock + kTile, kSumStride);
  }
}

RAY_HETERO_AMX void add_rows_amx(const Task& task, std::int64_t row, const std::uint16_t* w,
                                 std::int64_t rows, float* sums) {
  const std::int64_t step = task.m * 2 * kTile;
  const std::uint16_t* x = task.x + row / kTile * step;
  for (std::int64_t token = 0; token < task.m; token += 2 * kTile) {
    const auto group = std::min<std::int64_t>(2 * kTile, task.m - token);
    const TileConfig config(group);
    _tile_loadconfig(&config);
    const auto add = group > kTile ? add_tiles<true> : add_tiles<false>;
    add(x + token * 2 * kTile, step, w, rows, sums + token * kBlock);
  }
}

RAY_HETERO_AMX void release_tiles() { _tile_release(); }

// x [m][stride] as tiles [k / 32][m][32], so that the rows of a tile are neighbours.
RAY_HETERO_BF16 void pack_tokens(const Task& task, std::int64_t tile, std::uint16_t* packed) {
  for (std::int64_t token = 0; token < task.m; ++token) {
    _mm512_storeu_si512(packed + (tile * task.m + token) * 2 * kTile,
                        _mm512_loadu_si512(task.x + token * task.stride + tile * 2 * kTile));
  }
}

// ---- both ---------------------------------------------------------------------------------------

// Sums of rows [from, to) of one block, for all tokens.
void sum_block(const Task& task, std::int64_t block, std::int64_t from, std::int64_t to,
               float* sums) {
  std::fill_n(sums, task.m * kBlock, 0.0f);
  const std::uint16_t* w = task.w + block * task.pairs * 2 * kBlock;
  const auto add = task.use_amx ? add_rows_amx : add_rows_avx;
  for (std::int64_t row = from; row < to; row += kRows) {
    add(task, row, w + row * 2 * kBlock, std::min(kRows, to - row), sums);
  }
}

RAY_HETERO_BF16 void store_block(const Task& task, std::int64_t block, const float* sums) {
  for (std::int64_t token = 0; token < task.m; ++token, sums += kBlock) {
    for (int half = 0; half < kBlock; half += kTile) {
      const std::int64_t at = block * kBlock + half;
      __m512 sum = _mm512_loadu_ps(sums + half);
      if (task.bias != nullptr) sum = _mm512_add_ps(sum, _mm512_loadu_ps(task.bias + at));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(task.y + token * task.n + at),
                          (__m256i)_mm512_cvtneps_pbh(sum));
    }
  }
}

// A thread's share of all rows; blocks that it has alone are stored, the others kept.
void run_share(const Task& task, std::int64_t part, std::int64_t parts, Partial* kept) {
  const std::int64_t total = task.n / kBlock * task.pairs;
  const std::int64_t grains = (total + kGrain - 1) / kGrain;
  const std::int64_t begin = std::min(total, grains * part / parts * kGrain);
  const std::int64_t end = std::min(total, grains * (part + 1) / parts * kGrain);
  std::vector<float> sums(task.m * kBlock);
  for (std::int64_t at = begin; at < end;) {
    const std::int64_t block = at / task.pairs;
    const std::int64_t from = at - block * task.pairs;
    const std::int64_t to = std::min(task.pairs, end - block * task.pairs);
    sum_block(task, block, from, to, sums.data());
    if (from == 0 && to == task.pairs) {
      store_block(task, block, sums.data());
    } else {
      kept->block = block;
      kept->sums = sums;
      ++kept;
    }
    at = block * task.pairs + to;
  }
}

// The blocks that threads share; partials are in the order of threads, which is that of blocks.
void add_up(const Task& task, std::vector<Partial>& partials) {
  Partial* sum = nullptr;
  for (Partial& partial : partials) {
    if (partial.block < 0) continue;
    if (sum != nullptr && sum->block == partial.block) {
      for (std::size_t i = 0; i < sum->sums.size(); ++i) sum->sums[i] += partial.sums[i];
      continue;
    }
    if (sum != nullptr) store_block(task, sum->block, sum->sums.data());
    sum = &partial;
  }
  if (sum != nullptr) store_block(task, sum->block, sum->sums.data());
}

bool has_bf16() {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl");
}

// Whether there is AMX-BF16 and the kernel lets this process use its state.
bool has_amx() {
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h, not in every libc
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & kBf16) == 0 || (edx & kTiles) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

void run_shares(const Task& task) {
  const int parts = omp_get_max_threads();
  std::vector<Partial> partials(2 * static_cast<std::size_t>(parts));
#pragma omp parallel for schedule(static, 1) num_threads(parts)
  for (int part = 0; part < parts; ++part) {
    run_share(task, part, parts, &partials[2 * static_cast<std::size_t>(part)]);
    if (task.use_amx) release_tiles();
  }
  add_up(task, partials);
}

void run(Task task) {
  std::vector<std::uint16_t> packed(task.use_amx ? task.m * task.pairs * 2 : 0);
  if (task.use_amx) {
#pragma omp parallel for schedule(static)
    for (std::int64_t tile = 0; tile < task.pairs / kTile; ++tile) {
      pack_tokens(task, tile, packed.data());
    }
    task.x = packed.data();
  }
  run_shares(task);
}

#else

bool has_bf16() { return false; }
bool has_amx() { return false; }
void run(const Task&) {}

#endif

template <typename T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void linear(std::uintptr_t x, std::int64_t stride, std::uintptr_t w, std::uintptr_t bias,
            std::uintptr_t y, std::int64_t m, std::int64_t n, std::int64_t k, bool use_amx) {
  if (!has_bf16()) throw py::value_error("this processor has no AVX-512-BF16");
  if (n % kBlock != 0 || k % (2 * kTile) != 0 || m < 0 || n <= 0 || k <= 0) {
    throw py::value_error("expected N and K in multiples of 32");
  }
  const Task task{pointer<const std::uint16_t>(x),
                  pointer<const std::uint16_t>(w),
                  pointer<const float>(bias),
                  pointer<std::uint16_t>(y),
                  m,
                  n,
                  k / 2,
                  stride,
                  use_amx};
  py::gil_scoped_release release;
  run(task);
}

}  // namespace

PYBIND11_MODULE(_decode_linear, module) {
  module.doc() = "Linear layers of a decode step in bf16, at memory bandwidth.";
  module.def("has_bf16", &has_bf16, "Whether this processor has AVX-512-BF16.");
  module.def("has_amx", &has_amx, "Whether this process may use AMX-BF16; asks the kernel for it.");
  module.def("linear", &linear, py::arg("x"), py::arg("stride"), py::arg("w"), py::arg("bias"),
             py::arg("y"), py::arg("m"), py::arg("n"), py::arg("k"), py::arg("use_amx"),
             "y [m, n] = x [m, k] · Wᵀ + bias, all bf16 but the bias (float32), given by address.\n\n"
             "`stride` is elements between tokens of x; w is packed as [n / 32][k / 2][32][2];\n"
             "bias may be 0.  Uses the threads of the OpenMP runtime that the process has.\n"
             "Raises ValueError: shapes that the layout cannot hold, or a processor without\n"
             "AVX-512-BF16.");
}

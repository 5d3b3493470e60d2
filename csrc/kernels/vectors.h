// Vectors of 16 floats, and sums of tokens that stay in registers, two vectors for each token.

#pragma once

#include "formats/packed.h"

#include <cmath>
#include <cstdint>

#if defined(__x86_64__)
// GCC 12 takes the undefined operands of some of its own intrinsics for mistakes (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#define RAY_HETERO_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
// For what is done a row at a time; a call would pass its vectors through memory.
#define RAY_HETERO_INLINE __attribute__((always_inline)) inline
#define RAY_HETERO_AMX \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,amx-tile,amx-bf16")))
#endif

namespace ray_hetero {

#if defined(__x86_64__)

RAY_HETERO_BF16 inline void store_bf16(std::uint16_t* at, __m512 values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), (__m256i)_mm512_cvtneps_pbh(values));
}

RAY_HETERO_BF16 inline __m512 widened(__m256i values) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}

RAY_HETERO_BF16 inline __m512 load_bf16(const std::uint16_t* at) {
  return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

RAY_HETERO_BF16 inline __m512 rounded(__m512 values) {
  return widened((__m256i)_mm512_cvtneps_pbh(values));
}

// 2^x, infinite where it is too large; the series of 2^f, |f| ≤ 1/2, is good to 2e-7.
RAY_HETERO_BF16 inline __m512 power_of_two(__m512 x) {
  constexpr float kSeries[] = {1.0f,          0.69314718f,   0.24022651f,  0.055504109f,
                               0.0096181291f, 0.0013333558f, 0.00015403530f};
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_sub_ps(x, whole);
  __m512 sum = _mm512_set1_ps(kSeries[6]);
  for (int i = 5; i >= 0; --i) sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(kSeries[i]));
  return _mm512_scalef_ps(sum, whole);
}

constexpr float kLog2E = 1.44269504f;  // e^x = 2^(x · log2 e)

constexpr int kGroup = 8;

template <int M>
struct Sums {
  __m512 left[M], right[M];

  RAY_HETERO_BF16 RAY_HETERO_INLINE void clear() {
    for (int i = 0; i < M; ++i) left[i] = right[i] = _mm512_setzero_ps();
  }
  RAY_HETERO_BF16 RAY_HETERO_INLINE void load(const float* from, std::int64_t stride) {
    for (int i = 0; i < M; ++i) {
      left[i] = _mm512_loadu_ps(from + i * stride);
      right[i] = _mm512_loadu_ps(from + i * stride + kTile);
    }
  }
  RAY_HETERO_BF16 RAY_HETERO_INLINE void store(float* to, std::int64_t stride) const {
    for (int i = 0; i < M; ++i) {
      _mm512_storeu_ps(to + i * stride, left[i]);
      _mm512_storeu_ps(to + i * stride + kTile, right[i]);
    }
  }
};

template <int M>
RAY_HETERO_BF16 inline void add_row(const std::uint16_t* x, std::int64_t stride, __m512i left,
                                    __m512i right, Sums<M>& sums) {
  for (int i = 0; i < M; ++i) {
    std::int32_t pair;
    __builtin_memcpy(&pair, x + i * stride, sizeof(pair));
    const auto both = (__m512bh)_mm512_set1_epi32(pair);
    sums.left[i] = _mm512_dpbf16_ps(sums.left[i], (__m512bh)left, both);
    sums.right[i] = _mm512_dpbf16_ps(sums.right[i], (__m512bh)right, both);
  }
}

inline float as_float(std::uint16_t value) {
  const std::uint32_t bits = std::uint32_t{value} << 16;
  float widened;
  __builtin_memcpy(&widened, &bits, sizeof(widened));
  return widened;
}

#endif

}  // namespace ray_hetero

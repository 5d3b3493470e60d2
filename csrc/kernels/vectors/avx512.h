// Vectors of one AVX-512 register; the operations are described in portable.h.
//
// Included once for each level that has these vectors, see levels.h; RAY_HETERO_HAS_BF16 is 1 where
// there is AVX512-BF16, RAY_HETERO_IS_HALF where elements are float16 in the place of bf16.

#pragma once

#include "../vectors.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

constexpr int kGroup = 8;  // tokens whose sums, two registers each, leave room for weights

using Floats = __m512;
using Pairs = __m512i;

RAY_HETERO_INLINE Floats spread(float value) { return _mm512_set1_ps(value); }
RAY_HETERO_INLINE Floats zeros() { return _mm512_setzero_ps(); }
RAY_HETERO_INLINE Floats load_floats(const float* at) { return _mm512_loadu_ps(at); }
RAY_HETERO_INLINE void store_floats(float* at, Floats values) { _mm512_storeu_ps(at, values); }

RAY_HETERO_INLINE Floats widened(__m256i values) {
#if RAY_HETERO_IS_HALF
  return _mm512_cvtph_ps(values);
#else
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
#endif
}
RAY_HETERO_INLINE Floats load_bf16(const std::uint16_t* at) {
  return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}
RAY_HETERO_INLINE __m256i narrowed(Floats values) {
#if RAY_HETERO_IS_HALF
  return _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
#elif RAY_HETERO_HAS_BF16
  return (__m256i)_mm512_cvtneps_pbh(values);
#else
  const __m512i bits = _mm512_castps_si512(values), one = _mm512_set1_epi32(1);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  const __m512i even = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512i chosen = _mm512_mask_or_epi32(even, is_nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16));
#endif
}
RAY_HETERO_INLINE void store_bf16(std::uint16_t* at, Floats values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), narrowed(values));
}
RAY_HETERO_INLINE Floats rounded(Floats values) { return widened(narrowed(values)); }

RAY_HETERO_INLINE Floats plus(Floats left, Floats right) { return _mm512_add_ps(left, right); }
RAY_HETERO_INLINE Floats minus(Floats left, Floats right) { return _mm512_sub_ps(left, right); }
RAY_HETERO_INLINE Floats times(Floats left, Floats right) { return _mm512_mul_ps(left, right); }
RAY_HETERO_INLINE Floats over(Floats left, Floats right) { return _mm512_div_ps(left, right); }
RAY_HETERO_INLINE Floats times_plus(Floats left, Floats right, Floats sum) {
  return _mm512_fmadd_ps(left, right, sum);
}
RAY_HETERO_INLINE Floats times_minus(Floats left, Floats right, Floats sum) {
  return _mm512_fmsub_ps(left, right, sum);
}

RAY_HETERO_INLINE __mmask16 before(std::int64_t lanes) {
  return static_cast<__mmask16>((1u << std::clamp<std::int64_t>(lanes, 0, kLanes)) - 1);
}
RAY_HETERO_INLINE Floats first(Floats values, std::int64_t lanes) {
  return _mm512_maskz_mov_ps(before(lanes), values);
}
RAY_HETERO_INLINE Floats larger_of_first(Floats most, Floats values, std::int64_t lanes) {
  return _mm512_mask_max_ps(most, before(lanes), most, values);
}
RAY_HETERO_INLINE float largest_of(Floats values) { return _mm512_reduce_max_ps(values); }
RAY_HETERO_INLINE float sum_of(Floats values) { return _mm512_reduce_add_ps(values); }

RAY_HETERO_INLINE Floats power_of_two(Floats x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_sub_ps(x, whole);
  __m512 sum = _mm512_set1_ps(kPowerSeries[6]);
  for (int i = 5; i >= 0; --i) {
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(kPowerSeries[i]));
  }
  return _mm512_scalef_ps(sum, whole);
}

RAY_HETERO_INLINE Pairs load_pairs(const void* at) { return _mm512_loadu_si512(at); }
RAY_HETERO_INLINE void store_pairs(void* at, Pairs values) { _mm512_storeu_si512(at, values); }
RAY_HETERO_INLINE Pairs spread_pair(const std::uint16_t* at) {
  std::int32_t pair;
  std::memcpy(&pair, at, sizeof(pair));
  return _mm512_set1_epi32(pair);
}
RAY_HETERO_INLINE Floats firsts(Pairs pairs) {
#if RAY_HETERO_IS_HALF
  return widened(_mm512_cvtepi32_epi16(pairs));
#else
  return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
#endif
}
RAY_HETERO_INLINE Floats seconds(Pairs pairs) {
#if RAY_HETERO_IS_HALF
  return widened(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
#else
  return _mm512_castsi512_ps(
      _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
#endif
}
RAY_HETERO_INLINE Floats load_firsts(const std::uint16_t* at) { return firsts(load_pairs(at)); }
RAY_HETERO_INLINE Floats load_seconds(const std::uint16_t* at) { return seconds(load_pairs(at)); }
RAY_HETERO_INLINE Pairs narrowed_pairs(Floats firsts, Floats seconds) {
  const __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrowed(seconds)), 16);
  return _mm512_or_si512(_mm512_cvtepu16_epi32(narrowed(firsts)), upper);
}
RAY_HETERO_INLINE void store_in_turns(std::uint16_t* at, Floats firsts, Floats seconds) {
  store_pairs(at, narrowed_pairs(firsts, seconds));
}
RAY_HETERO_INLINE Pairs without_seconds(Pairs pairs) {
  return _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff));
}
RAY_HETERO_INLINE Floats gathered(const std::uint16_t* pairs, bool is_second, std::int64_t step,
                                  std::int64_t lanes) {
  const __m512i number =
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i last = _mm512_set1_epi32(static_cast<int>(lanes < kLanes ? lanes : kLanes) - 1);
  const __m512i at = _mm512_mullo_epi32(_mm512_min_epi32(number, last),
                                        _mm512_set1_epi32(static_cast<int>(step)));
  const __m512i found = _mm512_i32gather_epi32(at, pairs, 2);
  return is_second ? seconds(found) : firsts(found);
}
RAY_HETERO_INLINE Floats dot(Floats sum, Pairs left, Pairs right) {
#if RAY_HETERO_HAS_BF16
  return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right);
#else
  const Floats second = _mm512_fmadd_ps(seconds(left), seconds(right), sum);
  return _mm512_fmadd_ps(firsts(left), firsts(right), second);
#endif
}

RAY_HETERO_INLINE Pairs spread_quarter(const std::uint8_t* at) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}
RAY_HETERO_INLINE Pairs lower_halves(Pairs bytes) {
  return _mm512_and_si512(bytes, _mm512_set1_epi8(15));
}
RAY_HETERO_INLINE Pairs upper_halves(Pairs bytes) {
  return lower_halves(_mm512_srli_epi16(bytes, 4));
}
RAY_HETERO_INLINE Pairs looked_up(Pairs table, Pairs numbers) {
  return _mm512_shuffle_epi8(table, numbers);
}
RAY_HETERO_INLINE Pairs turns_of_first(Pairs left, Pairs right) {
  return _mm512_unpacklo_epi8(left, right);
}
RAY_HETERO_INLINE Pairs turns_of_second(Pairs left, Pairs right) {
  return _mm512_unpackhi_epi8(left, right);
}

template <int kShift, int kBits>
RAY_HETERO_INLINE Floats large_codes(Pairs lanes) {
  const __m512i mask = _mm512_set1_epi32((1 << kBits) - 1);
  const __m512i large = _mm512_castps_si512(_mm512_set1_ps(kLargeCodes));
  constexpr int kAndOr = 0xea;  // (first & second) | third
  return _mm512_castsi512_ps(
      _mm512_ternarylogic_epi32(_mm512_srli_epi32(lanes, kShift), mask, large, kAndOr));
}
RAY_HETERO_INLINE __m512i widened_bytes(const std::uint8_t* at) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}
RAY_HETERO_INLINE Floats load_large_codes(const std::uint8_t* at) {
  const __m512i large = _mm512_castps_si512(_mm512_set1_ps(kLargeCodes));
  return _mm512_castsi512_ps(_mm512_or_si512(widened_bytes(at), large));
}
using WordTable = __m512i;
RAY_HETERO_INLINE WordTable word_table(const std::uint16_t* at) {
  return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}
// Shuffles take a port of the processor that shifts and products leave free, and look-ups the same.
constexpr std::uint8_t kNoByte = 0x80;
constexpr std::uint8_t kFirstBytesUp[16] = {kNoByte, 0, kNoByte, 2,  kNoByte, 4,  kNoByte, 6,
                                            kNoByte, 8, kNoByte, 10, kNoByte, 12, kNoByte, 14};
// Of a number only its last five bits count, and the fifth chooses between equals.
template <int kShift>
RAY_HETERO_INLINE Pairs looked_up_words(WordTable table, Pairs words) {
  return _mm512_permutexvar_epi16(kShift == 0 ? words : _mm512_srli_epi16(words, kShift), table);
}
// The same of lanes of 32 bits: of a number only its last four bits count.
template <int kShift>
RAY_HETERO_INLINE Floats looked_up_floats(Floats table, Pairs lanes) {
  return _mm512_permutexvar_ps(kShift == 0 ? lanes : _mm512_srli_epi32(lanes, kShift), table);
}
RAY_HETERO_INLINE Floats load_exponents(const std::uint8_t* at) {
  const __m512i bits = _mm512_slli_epi32(widened_bytes(at), 23);
  return _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(0x400000)));
}
// As numbers whose exponents are 0 would be if they were not denormal.
RAY_HETERO_INLINE Pairs e4m3_as_normal(Pairs upper) {
  constexpr int kAndOr = 0xea;  // (first & second) | third
  return _mm512_ternarylogic_epi32(_mm512_srai_epi16(upper, 4),
                                   _mm512_set1_epi16(static_cast<short>(0x87f0)),
                                   _mm512_set1_epi16(0x3800), kAndOr);
}
// What these are.
RAY_HETERO_INLINE Pairs e4m3_with_small(Pairs normal, Pairs upper, Pairs numbers) {
  const __mmask32 is_small = _mm512_testn_epi16_mask(upper, _mm512_set1_epi16(0x7800));
  const __m512i missing = _mm512_castsi128_si512(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(kE4m3Missing)));
  return _mm512_add_epi16(normal, _mm512_maskz_permutexvar_epi16(is_small, numbers, missing));
}
RAY_HETERO_INLINE void e4m3_pairs(const Pairs (&bytes)[2], Pairs (&even)[2], Pairs (&odd)[2]) {
  Pairs upper[2];
  for (int row = 0; row < 2; ++row) {
    upper[row] = _mm512_shuffle_epi8(bytes[row], spread_quarter(kFirstBytesUp));
    even[row] = e4m3_as_normal(upper[row]);
    odd[row] = e4m3_as_normal(bytes[row]);
  }
  // One weight in thousands.
  const __m512i exponents = _mm512_set1_epi8(0x78);
  const __mmask64 is_small = _mm512_testn_epi8_mask(bytes[0], exponents) |
                             _mm512_testn_epi8_mask(bytes[1], exponents);
  if (__builtin_expect(is_small != 0, 0)) {
    for (int row = 0; row < 2; ++row) {
      even[row] = e4m3_with_small(even[row], upper[row], bytes[row]);
      odd[row] = e4m3_with_small(odd[row], bytes[row], _mm512_srli_epi16(bytes[row], 8));
    }
  }
}
RAY_HETERO_INLINE Floats load_e4m3(const std::uint8_t* at) {
  const __m512i upper = _mm512_slli_epi32(widened_bytes(at), 24);
  // As float16 of 2^-8 times the value, denormal ones included.
  const __m512i halves = _mm512_and_si512(_mm512_srai_epi32(upper, 1),
                                          _mm512_set1_epi32(static_cast<int>(0xbf800000)));
  const __m512 values = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(halves, 16)));
  return _mm512_mul_ps(values, _mm512_set1_ps(256));
}
#if RAY_HETERO_IS_HALF
RAY_HETERO_INLINE Pairs exact_pairs(Floats first, Floats second) {
  return narrowed_pairs(first, second);
}
RAY_HETERO_INLINE Pairs rounded_pairs(Floats first, Floats second) {
  return narrowed_pairs(first, second);
}
#else
RAY_HETERO_INLINE Pairs exact_pairs(Floats first, Floats second) {
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(first), 16),
                         _mm512_castps_si512(second));
}
#if RAY_HETERO_HAS_BF16
RAY_HETERO_INLINE Pairs rounded_pairs(Floats first, Floats second) {
  // The seconds lie behind all firsts: words 0, 16, 1, 17, ….
  const __m512i in_turns = _mm512_setr_epi32(
      0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007, 0x180008,
      0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
  return _mm512_permutexvar_epi16(in_turns, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}
#else
// Floats rounded to bf16, in the upper half of each lane with remains below; not of NaN.
RAY_HETERO_INLINE __m512i rounded_number_bits(Floats values) {
  const __m512i bits = _mm512_castps_si512(values), one = _mm512_set1_epi32(1);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}
RAY_HETERO_INLINE Pairs rounded_pairs(Floats first, Floats second) {
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(rounded_number_bits(first), 16),
                                 rounded_number_bits(second));
}
#endif
#endif

}  // namespace ray_hetero::RAY_HETERO_LEVEL

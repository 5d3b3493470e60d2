// Vectors of two AVX registers, with FMA; the operations are described in portable.h.
//
// Included once for each level that has these vectors, see levels.h; RAY_HETERO_IS_HALF is 1 where
// elements are float16 in the place of bf16.

#pragma once

#include "../vectors.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

constexpr int kGroup = 3;  // tokens whose sums, four registers each, leave room for weights

struct Floats {
  __m256 half[2];
};

struct Pairs {
  __m256i half[2];
};

template <typename One>
RAY_HETERO_INLINE Floats each_half(One one) {
  return {{one(0), one(1)}};
}

RAY_HETERO_INLINE Floats spread(float value) {
  const __m256 all = _mm256_set1_ps(value);
  return {{all, all}};
}
RAY_HETERO_INLINE Floats zeros() { return {{_mm256_setzero_ps(), _mm256_setzero_ps()}}; }
RAY_HETERO_INLINE Floats load_floats(const float* at) {
  return {{_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}};
}
RAY_HETERO_INLINE void store_floats(float* at, Floats values) {
  _mm256_storeu_ps(at, values.half[0]);
  _mm256_storeu_ps(at + 8, values.half[1]);
}
RAY_HETERO_INLINE __m256 widened(__m128i values) {
#if RAY_HETERO_IS_HALF
  return _mm256_cvtph_ps(values);
#else
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(values), 16));
#endif
}
RAY_HETERO_INLINE Floats load_bf16(const std::uint16_t* at) {
  const auto* halves = reinterpret_cast<const __m128i*>(at);
  return {{widened(_mm_loadu_si128(halves)), widened(_mm_loadu_si128(halves + 1))}};
}
#if RAY_HETERO_IS_HALF
RAY_HETERO_INLINE __m128i narrowed(__m256 values) {
  return _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
}
RAY_HETERO_INLINE void store_bf16(std::uint16_t* at, Floats values) {
  auto* halves = reinterpret_cast<__m128i*>(at);
  _mm_storeu_si128(halves, narrowed(values.half[0]));
  _mm_storeu_si128(halves + 1, narrowed(values.half[1]));
}
RAY_HETERO_INLINE Floats rounded(Floats values) {
  return each_half([&](int i) { return widened(narrowed(values.half[i])); });
}
#else
// Floats rounded to bf16, in the upper half of each lane.
RAY_HETERO_INLINE __m256i rounded_bits(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i even = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
  const __m256i chosen = _mm256_blendv_epi8(even, quiet, _mm256_castps_si256(is_nan));
  return _mm256_and_si256(chosen, _mm256_set1_epi32(static_cast<int>(0xffff0000)));
}
RAY_HETERO_INLINE void store_bf16(std::uint16_t* at, Floats values) {
  const __m256i packed =
      _mm256_packus_epi32(_mm256_srli_epi32(rounded_bits(values.half[0]), 16),
                          _mm256_srli_epi32(rounded_bits(values.half[1]), 16));
  // Packing takes quarters of both in turns.
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm256_permute4x64_epi64(packed, 0xd8));
}
RAY_HETERO_INLINE Floats rounded(Floats values) {
  return each_half([&](int i) { return _mm256_castsi256_ps(rounded_bits(values.half[i])); });
}
#endif

RAY_HETERO_INLINE Floats plus(Floats left, Floats right) {
  return each_half([&](int i) { return _mm256_add_ps(left.half[i], right.half[i]); });
}
RAY_HETERO_INLINE Floats minus(Floats left, Floats right) {
  return each_half([&](int i) { return _mm256_sub_ps(left.half[i], right.half[i]); });
}
RAY_HETERO_INLINE Floats times(Floats left, Floats right) {
  return each_half([&](int i) { return _mm256_mul_ps(left.half[i], right.half[i]); });
}
RAY_HETERO_INLINE Floats over(Floats left, Floats right) {
  return each_half([&](int i) { return _mm256_div_ps(left.half[i], right.half[i]); });
}
RAY_HETERO_INLINE Floats times_plus(Floats left, Floats right, Floats sum) {
  return each_half(
      [&](int i) { return _mm256_fmadd_ps(left.half[i], right.half[i], sum.half[i]); });
}
RAY_HETERO_INLINE Floats times_minus(Floats left, Floats right, Floats sum) {
  return each_half(
      [&](int i) { return _mm256_fmsub_ps(left.half[i], right.half[i], sum.half[i]); });
}

// All bits of the lanes before `lanes`.
RAY_HETERO_INLINE __m256 before(std::int64_t lanes, int half) {
  const __m256i number = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i end = _mm256_set1_epi32(static_cast<int>(lanes < kLanes ? lanes : kLanes) -
                                        8 * half);
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(end, number));
}
RAY_HETERO_INLINE Floats first(Floats values, std::int64_t lanes) {
  return each_half([&](int i) { return _mm256_and_ps(values.half[i], before(lanes, i)); });
}
RAY_HETERO_INLINE Floats larger_of_first(Floats most, Floats values, std::int64_t lanes) {
  return each_half([&](int i) {
    const __m256 larger = _mm256_max_ps(most.half[i], values.half[i]);
    return _mm256_blendv_ps(most.half[i], larger, before(lanes, i));
  });
}
RAY_HETERO_INLINE float largest_of(Floats values) {
  const __m256 eight = _mm256_max_ps(values.half[0], values.half[1]);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
RAY_HETERO_INLINE float sum_of(Floats values) {
  const __m256 eight = _mm256_add_ps(values.half[0], values.half[1]);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

RAY_HETERO_INLINE __m256 scaled(__m256 values, __m256i exponent) {
  const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(values, _mm256_castsi256_ps(bits));
}
RAY_HETERO_INLINE Floats power_of_two(Floats x) {
  return each_half([&](int i) {
    // The second operand is what is taken for NaN.
    const __m256 least = _mm256_max_ps(_mm256_set1_ps(-252), x.half[i]);
    const __m256 kept = _mm256_min_ps(_mm256_set1_ps(252), least);
    const __m256 whole = _mm256_round_ps(kept, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 part = _mm256_sub_ps(kept, whole);
    __m256 sum = _mm256_set1_ps(kPowerSeries[6]);
    for (int j = 5; j >= 0; --j) {
      sum = _mm256_fmadd_ps(sum, part, _mm256_set1_ps(kPowerSeries[j]));
    }
    // In two steps, as neither overflows alone.
    const __m256i exponent = _mm256_cvtps_epi32(whole), half = _mm256_srai_epi32(exponent, 1);
    return scaled(scaled(sum, half), _mm256_sub_epi32(exponent, half));
  });
}

RAY_HETERO_INLINE Pairs load_pairs(const void* at) {
  const auto* halves = static_cast<const __m256i*>(at);
  return {{_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)}};
}
RAY_HETERO_INLINE void store_pairs(void* at, Pairs values) {
  auto* halves = static_cast<__m256i*>(at);
  _mm256_storeu_si256(halves, values.half[0]);
  _mm256_storeu_si256(halves + 1, values.half[1]);
}
RAY_HETERO_INLINE Pairs spread_pair(const std::uint16_t* at) {
  std::int32_t pair;
  std::memcpy(&pair, at, sizeof(pair));
  const __m256i all = _mm256_set1_epi32(pair);
  return {{all, all}};
}
#if RAY_HETERO_IS_HALF
RAY_HETERO_INLINE __m256 firsts(__m256i pairs) {
  const __m256i lower = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff));
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(lower, lower), 0xd8);
  return widened(_mm256_castsi256_si128(packed));
}
RAY_HETERO_INLINE __m256 seconds(__m256i pairs) { return firsts(_mm256_srli_epi32(pairs, 16)); }
RAY_HETERO_INLINE Pairs narrowed_pairs(Floats firsts, Floats seconds) {
  Pairs pairs;
  for (int i = 0; i < 2; ++i) {
    const __m128i even = narrowed(firsts.half[i]), odd = narrowed(seconds.half[i]);
    pairs.half[i] =
        _mm256_set_m128i(_mm_unpackhi_epi16(even, odd), _mm_unpacklo_epi16(even, odd));
  }
  return pairs;
}
#else
RAY_HETERO_INLINE __m256 firsts(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}
RAY_HETERO_INLINE __m256 seconds(__m256i pairs) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, upper));
}
#endif
RAY_HETERO_INLINE Floats firsts(Pairs pairs) {
  return each_half([&](int i) { return firsts(pairs.half[i]); });
}
RAY_HETERO_INLINE Floats seconds(Pairs pairs) {
  return each_half([&](int i) { return seconds(pairs.half[i]); });
}
RAY_HETERO_INLINE Floats load_firsts(const std::uint16_t* at) { return firsts(load_pairs(at)); }
RAY_HETERO_INLINE Floats load_seconds(const std::uint16_t* at) { return seconds(load_pairs(at)); }
RAY_HETERO_INLINE void store_in_turns(std::uint16_t* at, Floats firsts, Floats seconds) {
#if RAY_HETERO_IS_HALF
  store_pairs(at, narrowed_pairs(firsts, seconds));
#else
  Pairs pairs;
  for (int i = 0; i < 2; ++i) {
    const __m256i lower = _mm256_srli_epi32(rounded_bits(firsts.half[i]), 16);
    pairs.half[i] = _mm256_or_si256(lower, rounded_bits(seconds.half[i]));
  }
  store_pairs(at, pairs);
#endif
}
RAY_HETERO_INLINE Pairs without_seconds(Pairs pairs) {
  const __m256i lower = _mm256_set1_epi32(0xffff);
  return {{_mm256_and_si256(pairs.half[0], lower), _mm256_and_si256(pairs.half[1], lower)}};
}
RAY_HETERO_INLINE Floats gathered(const std::uint16_t* pairs, bool is_second, std::int64_t step,
                                  std::int64_t lanes) {
  const __m256i last = _mm256_set1_epi32(static_cast<int>(lanes < kLanes ? lanes : kLanes) - 1);
  const __m256i apart = _mm256_set1_epi32(static_cast<int>(step));
  return each_half([&](int i) {
    const __m256i number = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                            _mm256_set1_epi32(8 * i));
    const __m256i at = _mm256_mullo_epi32(_mm256_min_epi32(number, last), apart);
    const __m256i found = _mm256_i32gather_epi32(reinterpret_cast<const int*>(pairs), at, 2);
    return is_second ? seconds(found) : firsts(found);
  });
}
RAY_HETERO_INLINE Floats dot(Floats sum, Pairs left, Pairs right) {
  return each_half([&](int i) {
    const __m256i one = left.half[i], other = right.half[i];
    const __m256 second = _mm256_fmadd_ps(seconds(one), seconds(other), sum.half[i]);
    return _mm256_fmadd_ps(firsts(one), firsts(other), second);
  });
}

RAY_HETERO_INLINE Pairs spread_quarter(const std::uint8_t* at) {
  const __m256i all =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  return {{all, all}};
}
RAY_HETERO_INLINE __m256i lower_bits(__m256i bytes) {
  return _mm256_and_si256(bytes, _mm256_set1_epi8(15));
}
RAY_HETERO_INLINE Pairs lower_halves(Pairs bytes) {
  return {{lower_bits(bytes.half[0]), lower_bits(bytes.half[1])}};
}
RAY_HETERO_INLINE Pairs upper_halves(Pairs bytes) {
  return {{lower_bits(_mm256_srli_epi16(bytes.half[0], 4)),
           lower_bits(_mm256_srli_epi16(bytes.half[1], 4))}};
}
RAY_HETERO_INLINE Pairs looked_up(Pairs table, Pairs numbers) {
  return {{_mm256_shuffle_epi8(table.half[0], numbers.half[0]),
           _mm256_shuffle_epi8(table.half[1], numbers.half[1])}};
}
RAY_HETERO_INLINE Pairs turns_of_first(Pairs left, Pairs right) {
  return {{_mm256_unpacklo_epi8(left.half[0], right.half[0]),
           _mm256_unpacklo_epi8(left.half[1], right.half[1])}};
}
RAY_HETERO_INLINE Pairs turns_of_second(Pairs left, Pairs right) {
  return {{_mm256_unpackhi_epi8(left.half[0], right.half[0]),
           _mm256_unpackhi_epi8(left.half[1], right.half[1])}};
}

template <int kShift, int kBits>
RAY_HETERO_INLINE Floats large_codes(Pairs lanes) {
  const __m256i mask = _mm256_set1_epi32((1 << kBits) - 1);
  const __m256i large = _mm256_castps_si256(_mm256_set1_ps(kLargeCodes));
  return each_half([&](int i) {
    const __m256i code = _mm256_and_si256(_mm256_srli_epi32(lanes.half[i], kShift), mask);
    return _mm256_castsi256_ps(_mm256_or_si256(code, large));
  });
}
RAY_HETERO_INLINE __m256i widened_bytes(const std::uint8_t* at) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
}
RAY_HETERO_INLINE Floats load_large_codes(const std::uint8_t* at) {
  const __m256i large = _mm256_castps_si256(_mm256_set1_ps(kLargeCodes));
  return each_half([&](int i) {
    return _mm256_castsi256_ps(_mm256_or_si256(widened_bytes(at + 8 * i), large));
  });
}
// Bytes of words that are looked up one by one.
RAY_HETERO_INLINE __m256i table_bytes(const std::uint16_t* at, int shift) {
  alignas(16) std::uint8_t bytes[16];
  for (int i = 0; i < 16; ++i) bytes[i] = static_cast<std::uint8_t>(at[i] >> shift);
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
}
struct WordTable {
  __m256i lower, upper;

  // Numbers have upper bytes of 0, for which entry 0 is looked up: its lower byte has to be 0.
  RAY_HETERO_INLINE __m256i at(__m256i numbers) const {
    const __m256i upper_bytes = _mm256_slli_epi16(_mm256_shuffle_epi8(upper, numbers), 8);
    return _mm256_or_si256(upper_bytes, _mm256_shuffle_epi8(lower, numbers));
  }
};
RAY_HETERO_INLINE WordTable word_table(const std::uint16_t* at) {
  return {table_bytes(at, 0), table_bytes(at, 8)};
}
template <int kShift>
RAY_HETERO_INLINE Pairs looked_up_words(const WordTable& table, Pairs words) {
  Pairs found;
  for (int i = 0; i < 2; ++i) {
    const __m256i shifted = _mm256_srli_epi16(words.half[i], kShift);
    found.half[i] = table.at(_mm256_and_si256(shifted, _mm256_set1_epi16(15)));
  }
  return found;
}
RAY_HETERO_INLINE Floats load_exponents(const std::uint8_t* at) {
  return each_half([&](int i) {
    const __m256i bits = _mm256_slli_epi32(widened_bytes(at + 8 * i), 23);
    return _mm256_castsi256_ps(_mm256_max_epu32(bits, _mm256_set1_epi32(0x400000)));
  });
}
// As numbers whose exponents are 0 would be if they were not denormal.
RAY_HETERO_INLINE __m256i e4m3_as_normal(__m256i upper) {
  const __m256i number = _mm256_and_si256(_mm256_srai_epi16(upper, 4),
                                          _mm256_set1_epi16(static_cast<short>(0x87f0)));
  return _mm256_or_si256(number, _mm256_set1_epi16(0x3800));
}
// What these are.
RAY_HETERO_INLINE __m256i e4m3_with_small(__m256i normal, __m256i upper) {
  const __m256i exponent = _mm256_and_si256(upper, _mm256_set1_epi16(0x7800));
  const __m256i is_small = _mm256_cmpeq_epi16(exponent, _mm256_setzero_si256());
  const __m256i number = _mm256_and_si256(_mm256_srli_epi16(upper, 8), _mm256_set1_epi16(7));
  const __m256i missing = word_table(kE4m3Missing).at(number);
  return _mm256_add_epi16(normal, _mm256_and_si256(missing, is_small));
}
RAY_HETERO_INLINE void e4m3_pairs_of_row(Pairs bytes, Pairs& even, Pairs& odd) {
  __m256i upper[2];
  for (int i = 0; i < 2; ++i) {
    upper[i] = _mm256_slli_epi16(bytes.half[i], 8);
    even.half[i] = e4m3_as_normal(upper[i]);
    odd.half[i] = e4m3_as_normal(bytes.half[i]);
  }
  // One weight in thousands.
  const __m256i exponents = _mm256_set1_epi8(0x78);
  const __m256i least = _mm256_min_epu8(_mm256_and_si256(bytes.half[0], exponents),
                                        _mm256_and_si256(bytes.half[1], exponents));
  const __m256i is_small = _mm256_cmpeq_epi8(least, _mm256_setzero_si256());
  if (__builtin_expect(_mm256_movemask_epi8(is_small) != 0, 0)) {
    for (int i = 0; i < 2; ++i) {
      even.half[i] = e4m3_with_small(even.half[i], upper[i]);
      odd.half[i] = e4m3_with_small(odd.half[i], bytes.half[i]);
    }
  }
}
RAY_HETERO_INLINE void e4m3_pairs(const Pairs (&bytes)[2], Pairs (&even)[2], Pairs (&odd)[2]) {
  for (int row = 0; row < 2; ++row) e4m3_pairs_of_row(bytes[row], even[row], odd[row]);
}
RAY_HETERO_INLINE Floats load_e4m3(const std::uint8_t* at) {
  const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  // As float16 of 2^-8 times the value, denormal ones included.
  const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(words, 8), 1),
                                          _mm256_set1_epi16(static_cast<short>(0xbf80)));
  const __m256 more = _mm256_set1_ps(256);
  return {{_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), more),
           _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), more)}};
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
  Pairs pairs;
  for (int i = 0; i < 2; ++i) {
    const __m256i lower = _mm256_srli_epi32(_mm256_castps_si256(first.half[i]), 16);
    pairs.half[i] = _mm256_or_si256(lower, _mm256_castps_si256(second.half[i]));
  }
  return pairs;
}
// Floats rounded to bf16, in the upper half of each lane with remains below; not of NaN.
RAY_HETERO_INLINE __m256i rounded_number_bits(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}
RAY_HETERO_INLINE Pairs rounded_pairs(Floats first, Floats second) {
  Pairs pairs;
  for (int i = 0; i < 2; ++i) {
    const __m256i lower = _mm256_srli_epi32(rounded_number_bits(first.half[i]), 16);
    pairs.half[i] = _mm256_blend_epi16(lower, rounded_number_bits(second.half[i]), 0xaa);
  }
  return pairs;
}
#endif

}  // namespace ray_hetero::RAY_HETERO_LEVEL

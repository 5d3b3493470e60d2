// Vectors in plain C++: what each operation means, for every processor.
//
// Included once for each level that has these vectors, see levels.h.  Compared with it, other
// instruction sets multiply and add without rounding in between where floats are concerned; products
// of two bf16 are exact, so that sums of these are the same bit by bit.  Denormal numbers are 0 to
// all of them (denormals.h).

#pragma once

#include "../vectors.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

constexpr int kGroup = 4;  // tokens whose sums are kept in registers

struct Floats {
  float lane[kLanes];
};

// 16 pairs of bf16, or 64 bytes in four quarters of 16.
struct Pairs {
  std::uint8_t byte[4 * kLanes];
};

RAY_HETERO_INLINE Floats spread(float value) {
  Floats all;
  for (float& lane : all.lane) lane = value;
  return all;
}
RAY_HETERO_INLINE Floats zeros() { return spread(0); }
RAY_HETERO_INLINE Floats load_floats(const float* at) {
  Floats loaded;
  std::memcpy(loaded.lane, at, sizeof(loaded));
  return loaded;
}
RAY_HETERO_INLINE void store_floats(float* at, Floats values) {
  std::memcpy(at, values.lane, sizeof(values));
}
RAY_HETERO_INLINE Floats load_bf16(const std::uint16_t* at) {
  Floats loaded;
  for (int i = 0; i < kLanes; ++i) loaded.lane[i] = as_float(at[i]);
  return loaded;
}
RAY_HETERO_INLINE void store_bf16(std::uint16_t* at, Floats values) {
  for (int i = 0; i < kLanes; ++i) at[i] = as_bf16(values.lane[i]);
}
RAY_HETERO_INLINE Floats rounded(Floats values) {
  for (float& lane : values.lane) lane = as_float(as_bf16(lane));
  return values;
}

RAY_HETERO_INLINE Floats plus(Floats left, Floats right) {
  for (int i = 0; i < kLanes; ++i) left.lane[i] += right.lane[i];
  return left;
}
RAY_HETERO_INLINE Floats minus(Floats left, Floats right) {
  for (int i = 0; i < kLanes; ++i) left.lane[i] -= right.lane[i];
  return left;
}
RAY_HETERO_INLINE Floats times(Floats left, Floats right) {
  for (int i = 0; i < kLanes; ++i) left.lane[i] *= right.lane[i];
  return left;
}
RAY_HETERO_INLINE Floats over(Floats left, Floats right) {
  for (int i = 0; i < kLanes; ++i) left.lane[i] /= right.lane[i];
  return left;
}
RAY_HETERO_INLINE Floats times_plus(Floats left, Floats right, Floats sum) {
  return plus(times(left, right), sum);
}
RAY_HETERO_INLINE Floats times_minus(Floats left, Floats right, Floats sum) {
  return minus(times(left, right), sum);
}

// The first lanes of values, 0 in the others.
RAY_HETERO_INLINE Floats first(Floats values, std::int64_t lanes) {
  for (int i = 0; i < kLanes; ++i) values.lane[i] = i < lanes ? values.lane[i] : 0;
  return values;
}
// The larger of most and the first lanes of values.
RAY_HETERO_INLINE Floats larger_of_first(Floats most, Floats values, std::int64_t lanes) {
  for (int i = 0; i < kLanes; ++i) {
    if (i < lanes) most.lane[i] = most.lane[i] > values.lane[i] ? most.lane[i] : values.lane[i];
  }
  return most;
}
RAY_HETERO_INLINE float largest_of(Floats values) {
  float largest = values.lane[0];
  for (const float lane : values.lane) largest = largest > lane ? largest : lane;
  return largest;
}
// Lanes that are half of what is left apart are added, until one is left.
RAY_HETERO_INLINE float sum_of(Floats values) {
  for (int apart = kLanes / 2; apart > 0; apart /= 2) {
    for (int i = 0; i < apart; ++i) values.lane[i] += values.lane[i + apart];
  }
  return values.lane[0];
}

// 2^x, infinite where it is too large.
RAY_HETERO_INLINE Floats power_of_two(Floats x) {
  for (float& lane : x.lane) {
    // Rounded by adding what leaves no bits behind the point.
    constexpr float kWhole = 12582912.0f;
    const float kept = lane < -252 ? -252 : lane > 252 ? 252 : lane;
    const float whole = (kept + kWhole) - kWhole;
    const float part = kept - whole;
    float sum = kPowerSeries[6];
    for (int i = 5; i >= 0; --i) sum = sum * part + kPowerSeries[i];
    // In two steps, as neither overflows alone.
    const bool is_number = whole == whole;
    const std::int32_t exponent = is_number ? static_cast<std::int32_t>(whole) : 0;
    for (const std::int32_t step : {exponent / 2, exponent - exponent / 2}) {
      const std::int32_t bits = (step + 127) << 23;
      float scale;
      std::memcpy(&scale, &bits, sizeof(scale));
      sum *= scale;
    }
    lane = sum;
  }
  return x;
}

RAY_HETERO_INLINE Pairs load_pairs(const void* at) {
  Pairs loaded;
  std::memcpy(loaded.byte, at, sizeof(loaded));
  return loaded;
}
RAY_HETERO_INLINE void store_pairs(void* at, Pairs values) {
  std::memcpy(at, values.byte, sizeof(values));
}
// The first of each of 16 pairs of bf16, and the second.
RAY_HETERO_INLINE Floats load_firsts(const std::uint16_t* at) {
  Floats loaded;
  for (int i = 0; i < kLanes; ++i) loaded.lane[i] = as_float(at[2 * i]);
  return loaded;
}
RAY_HETERO_INLINE Floats load_seconds(const std::uint16_t* at) {
  Floats loaded;
  for (int i = 0; i < kLanes; ++i) loaded.lane[i] = as_float(at[2 * i + 1]);
  return loaded;
}
RAY_HETERO_INLINE Floats firsts(Pairs pairs) {
  std::uint16_t words[2 * kLanes];
  store_pairs(words, pairs);
  return load_firsts(words);
}
RAY_HETERO_INLINE Floats seconds(Pairs pairs) {
  std::uint16_t words[2 * kLanes];
  store_pairs(words, pairs);
  return load_seconds(words);
}
// 16 pairs of bf16.
RAY_HETERO_INLINE void store_in_turns(std::uint16_t* at, Floats firsts, Floats seconds) {
  for (int i = 0; i < kLanes; ++i) {
    at[2 * i] = as_bf16(firsts.lane[i]);
    at[2 * i + 1] = as_bf16(seconds.lane[i]);
  }
}
// The same pair in all lanes.
RAY_HETERO_INLINE Pairs spread_pair(const std::uint16_t* at) {
  Pairs all;
  for (int i = 0; i < kLanes; ++i) std::memcpy(all.byte + 4 * i, at, 4);
  return all;
}
// sum + left · right of each pair, the second product first, as VDPBF16PS does.
RAY_HETERO_INLINE Floats dot(Floats sum, Pairs left, Pairs right) {
  for (int i = 0; i < kLanes; ++i) {
    std::uint16_t one[2], other[2];
    std::memcpy(one, left.byte + 4 * i, 4);
    std::memcpy(other, right.byte + 4 * i, 4);
    sum.lane[i] += as_float(one[1]) * as_float(other[1]);
    sum.lane[i] += as_float(one[0]) * as_float(other[0]);
  }
  return sum;
}

// The first values of all pairs, with 0 for the second ones.
RAY_HETERO_INLINE Pairs without_seconds(Pairs pairs) {
  for (int i = 0; i < kLanes; ++i) pairs.byte[4 * i + 2] = pairs.byte[4 * i + 3] = 0;
  return pairs;
}
// The first or the second values of pairs that are `step` elements apart; only the first lanes
// count, of which there is at least one.
RAY_HETERO_INLINE Floats gathered(const std::uint16_t* pairs, bool is_second, std::int64_t step,
                                  std::int64_t lanes) {
  Floats found = zeros();
  for (int i = 0; i < kLanes && i < lanes; ++i) found.lane[i] = as_float(pairs[i * step + is_second]);
  return found;
}

// 16 bytes, in all quarters.
RAY_HETERO_INLINE Pairs spread_quarter(const std::uint8_t* at) {
  Pairs all;
  for (int quarter = 0; quarter < 4; ++quarter) std::memcpy(all.byte + 16 * quarter, at, 16);
  return all;
}
// The lower and the upper four bits of each byte.
RAY_HETERO_INLINE Pairs lower_halves(Pairs bytes) {
  for (std::uint8_t& byte : bytes.byte) byte &= 15;
  return bytes;
}
RAY_HETERO_INLINE Pairs upper_halves(Pairs bytes) {
  for (std::uint8_t& byte : bytes.byte) byte >>= 4;
  return bytes;
}
// Of each quarter of a table the bytes whose numbers are given.
RAY_HETERO_INLINE Pairs looked_up(Pairs table, Pairs numbers) {
  Pairs found;
  for (int i = 0; i < 4 * kLanes; ++i) found.byte[i] = table.byte[i / 16 * 16 + numbers.byte[i]];
  return found;
}
// Bytes of both in turns, from the first or the second eight of each quarter.
RAY_HETERO_INLINE Pairs turns(Pairs left, Pairs right, int from) {
  Pairs both;
  for (int i = 0; i < 4 * kLanes; ++i) {
    const int at = i / 16 * 16 + from + i % 16 / 2;
    both.byte[i] = i % 2 == 0 ? left.byte[at] : right.byte[at];
  }
  return both;
}
RAY_HETERO_INLINE Pairs turns_of_first(Pairs left, Pairs right) { return turns(left, right, 0); }
RAY_HETERO_INLINE Pairs turns_of_second(Pairs left, Pairs right) { return turns(left, right, 8); }

// ---- codes of a few bits and their scales -------------------------------------------------------

// kLargeCodes plus the kBits bits of each lane from kShift on; floats without rounding.
template <int kShift, int kBits>
RAY_HETERO_INLINE Floats large_codes(Pairs lanes) {
  Floats found;
  for (int i = 0; i < kLanes; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, lanes.byte + 4 * i, sizeof(bits));
    found.lane[i] = kLargeCodes + static_cast<float>(bits >> kShift & ((1u << kBits) - 1));
  }
  return found;
}
// The same of 16 bytes.
RAY_HETERO_INLINE Floats load_large_codes(const std::uint8_t* at) {
  Floats found;
  for (int i = 0; i < kLanes; ++i) found.lane[i] = kLargeCodes + static_cast<float>(at[i]);
  return found;
}
// The lower byte of a table's first entry is 0.
struct WordTable {
  std::uint16_t word[16];
};
RAY_HETERO_INLINE WordTable word_table(const std::uint16_t* at) {
  WordTable table;
  std::memcpy(table.word, at, sizeof(table.word));
  return table;
}
// Of a table of 16 those whose numbers are the four bits of each word from kShift on.
template <int kShift>
RAY_HETERO_INLINE Pairs looked_up_words(const WordTable& table, Pairs words) {
  std::uint16_t found[2 * kLanes];
  store_pairs(found, words);
  for (std::uint16_t& word : found) word = table.word[word >> kShift & 15];
  return load_pairs(found);
}
// Of a table of 16 floats those whose numbers are the four bits of each lane from kShift on.
template <int kShift>
RAY_HETERO_INLINE Floats looked_up_floats(Floats table, Pairs lanes) {
  Floats found;
  for (int i = 0; i < kLanes; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, lanes.byte + 4 * i, sizeof(bits));
    found.lane[i] = table.lane[bits >> kShift & 15];
  }
  return found;
}
// Powers of two by their exponents in 16 bytes, as float32 and E8M0 have them; 255 is none.
RAY_HETERO_INLINE Floats load_exponents(const std::uint8_t* at) {
  Floats found;
  for (int i = 0; i < kLanes; ++i) {
    const std::uint32_t bits = at[i] == 0 ? 0x400000u : std::uint32_t{at[i]} << 23;
    std::memcpy(found.lane + i, &bits, sizeof(bits));
  }
  return found;
}
// An E4M3 that is no NaN, as a bf16 of its value · 2^-8.
RAY_HETERO_INLINE std::uint16_t e4m3_word(std::uint32_t code) {
  const std::uint32_t as_normal = (code & 0x80) << 8 | (code & 0x7f) << 4 | 0x3800;
  const std::uint32_t missing = (code & 0x78) == 0 ? kE4m3Missing[code & 7] : 0;
  return static_cast<std::uint16_t>(as_normal + missing);
}
// Of every two bytes of a row the first, and the second.
RAY_HETERO_INLINE void e4m3_pairs(const Pairs (&bytes)[2], Pairs (&even)[2], Pairs (&odd)[2]) {
  for (int row = 0; row < 2; ++row) {
    std::uint16_t words[2][2 * kLanes];
    for (int i = 0; i < 4 * kLanes; ++i) words[i % 2][i / 2] = e4m3_word(bytes[row].byte[i]);
    even[row] = load_pairs(words[0]);
    odd[row] = load_pairs(words[1]);
  }
}
// The values of 16 E4M3 that are no NaN.
RAY_HETERO_INLINE Floats load_e4m3(const std::uint8_t* at) {
  Floats found;
  for (int i = 0; i < kLanes; ++i) found.lane[i] = as_float(e4m3_word(at[i])) * 256;
  return found;
}
// 16 pairs of bf16 from their firsts and seconds, which bf16 has.
RAY_HETERO_INLINE Pairs exact_pairs(Floats first, Floats second) {
  std::uint16_t words[2 * kLanes];
  store_in_turns(words, first, second);
  return load_pairs(words);
}
// The same of any that are no NaN: the nearest, the even one of two.
RAY_HETERO_INLINE Pairs rounded_pairs(Floats first, Floats second) {
  return exact_pairs(first, second);
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

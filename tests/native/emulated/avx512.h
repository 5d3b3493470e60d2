// The AVX-512 intrinsics that the kernels use, in C++: so that csrc/kernels/vectors/avx512.h is
// compiled and tested as it stands on processors without these instructions.
//
// Types and functions have the names of <immintrin.h>, in a namespace: where it is used, an
// unqualified name finds these before the compiler's own.  What they do is what "Intel 64 and IA-32
// Architectures Software Developer's Manual", volume 2, says of their instructions, with MXCSR as it
// is at the start of a program.  Where several NaN are possible, which one comes is not said.  What an
// instruction leaves undefined is filled with kUndefined, so that nothing relies on it unseen.

#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#ifndef __OPTIMIZE__
#error "without optimisation some intrinsics are macros of the compiler: compile with -O1 or more"
#endif
#ifdef __FAST_MATH__
#error "roundings and NaN of the instructions need arithmetic without -ffast-math"
#endif

// Macros of <immintrin.h>, which other processors do not have.
#ifndef _CMP_UNORD_Q
#define _CMP_UNORD_Q 3
#endif
#ifndef _MM_FROUND_TO_NEAREST_INT
#define _MM_FROUND_TO_NEAREST_INT 0
#define _MM_FROUND_NO_EXC 8
#endif

namespace ray_hetero::emulated {

// ---- registers ------------------------------------------------------------------------------------

typedef float __m512 __attribute__((vector_size(64)));
typedef long long __m512i __attribute__((vector_size(64)));
typedef short __m512bh __attribute__((vector_size(64)));
typedef long long __m256i __attribute__((vector_size(32)));
typedef short __m256bh __attribute__((vector_size(32)));
typedef long long __m128i __attribute__((vector_size(16)));
using __mmask16 = std::uint16_t;
using __mmask32 = std::uint32_t;
using __mmask64 = std::uint64_t;

// The same registers by what their lanes are taken for.
template <typename T, int kBytes = 64>
struct LanesOf {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <typename T, int kBytes = 64>
using Lanes = typename LanesOf<T, kBytes>::type;
using Words32 = Lanes<std::uint32_t>;
using Words16 = Lanes<std::uint16_t>;
using Bytes = Lanes<std::uint8_t>;
using Signed32 = Lanes<std::int32_t>;
using Signed16 = Lanes<std::int16_t>;

constexpr unsigned char kUndefined = 0xa5;

// What is more than an operator or two is called, not copied to each use: compiling takes less time.
#define RAY_HETERO_CALLED __attribute__((noinline)) inline

[[noreturn]] inline void fail(const char* why) {
  std::fprintf(stderr, "emulated instructions: %s\n", why);
  std::abort();
}

template <typename To, typename From>
inline To loaded(const From* at) {
  To value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}
template <typename To, typename From>
inline To with_undefined_rest(From from) {
  To value;
  std::memset(&value, kUndefined, sizeof(value));
  std::memcpy(&value, &from, sizeof(from));
  return value;
}
inline std::uint32_t bits_of(float value) { return loaded<std::uint32_t>(&value); }
inline float float_of(std::uint32_t bits) { return loaded<float>(&bits); }

// Denormal ones become zeros of their sign.
inline float flushed(float value) {
  const std::uint32_t bits = bits_of(value);
  return float_of((bits & 0x7f800000) == 0 ? bits & 0x80000000 : bits);
}
inline float widened_bf16(std::uint16_t value) { return float_of(std::uint32_t{value} << 16); }

// ---- memory and constants -------------------------------------------------------------------------

inline __m512 _mm512_loadu_ps(const void* at) { return loaded<__m512>(at); }
inline void _mm512_storeu_ps(void* at, __m512 values) { std::memcpy(at, &values, sizeof(values)); }
inline __m512i _mm512_loadu_si512(const void* at) { return loaded<__m512i>(at); }
inline void _mm512_storeu_si512(void* at, __m512i values) {
  std::memcpy(at, &values, sizeof(values));
}
inline __m256i _mm256_loadu_si256(const __m256i* at) { return loaded<__m256i>(at); }
inline void _mm256_storeu_si256(__m256i* at, __m256i values) {
  std::memcpy(at, &values, sizeof(values));
}
inline __m128i _mm_loadu_si128(const __m128i* at) { return loaded<__m128i>(at); }

RAY_HETERO_CALLED __m512i _mm512_i32gather_epi32(__m512i index, const void* base, int scale) {
  const auto numbers = (Signed32)index;
  Signed32 found;
  for (int i = 0; i < 16; ++i) {
    found[i] = loaded<std::int32_t>(static_cast<const char*>(base) +
                                    static_cast<std::int64_t>(numbers[i]) * scale);
  }
  return (__m512i)found;
}

inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m512 _mm512_set1_ps(float value) {
  __m512 all;
  for (int i = 0; i < 16; ++i) all[i] = value;
  return all;
}
inline __m512i _mm512_set1_epi32(int value) { return (__m512i)(Signed32{} + value); }
inline __m512i _mm512_set1_epi16(short value) { return (__m512i)(Signed16{} + value); }
inline __m512i _mm512_set1_epi8(char value) {
  return (__m512i)(Bytes{} + static_cast<std::uint8_t>(value));
}
inline __m512i _mm512_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h, int i,
                                 int j, int k, int l, int m, int n, int o, int p) {
  return (__m512i)Signed32{a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p};
}
inline __m512i _mm512_setr_epi64(long long a, long long b, long long c, long long d, long long e,
                                 long long f, long long g, long long h) {
  return __m512i{a, b, c, d, e, f, g, h};
}

// ---- casts and parts ------------------------------------------------------------------------------

inline __m512i _mm512_castps_si512(__m512 values) { return (__m512i)values; }
inline __m512 _mm512_castsi512_ps(__m512i values) { return (__m512)values; }
inline __m512i _mm512_castsi128_si512(__m128i values) {
  return with_undefined_rest<__m512i>(values);
}
inline __m256i _mm256_castsi128_si256(__m128i values) {
  return with_undefined_rest<__m256i>(values);
}
inline __m256i _mm512_extracti64x4_epi64(__m512i values, int half) {
  __m256i found;
  std::memcpy(&found, reinterpret_cast<const char*>(&values) + half % 2 * sizeof(found),
              sizeof(found));
  return found;
}
inline __m512i _mm512_broadcast_i32x4(__m128i values) {
  return __m512i{values[0], values[1], values[0], values[1],
                 values[0], values[1], values[0], values[1]};
}
inline __m512i _mm512_broadcast_i64x4(__m256i values) {
  return __m512i{values[0], values[1], values[2], values[3],
                 values[0], values[1], values[2], values[3]};
}

// ---- arithmetic of floats -------------------------------------------------------------------------

inline __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
inline __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
inline __m512 _mm512_div_ps(__m512 a, __m512 b) { return a / b; }
RAY_HETERO_CALLED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  float left[16], right[16], sum[16];
  std::memcpy(left, &a, sizeof(a));
  std::memcpy(right, &b, sizeof(b));
  std::memcpy(sum, &c, sizeof(c));
  for (int i = 0; i < 16; ++i) sum[i] = __builtin_fmaf(left[i], right[i], sum[i]);
  return loaded<__m512>(sum);
}
inline __m512 _mm512_fmsub_ps(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, -c); }
// VMAXPS: the second of two zeros, and where one is NaN.
inline __m512 max_ps(__m512 a, __m512 b) { return a > b ? a : b; }
RAY_HETERO_CALLED __m512 _mm512_mask_max_ps(__m512 other, __mmask16 mask, __m512 a, __m512 b) {
  const __m512 most = max_ps(a, b);
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) other[i] = most[i];
  }
  return other;
}
RAY_HETERO_CALLED __m512 _mm512_maskz_mov_ps(__mmask16 mask, __m512 values) {
  for (int i = 0; i < 16; ++i) {
    if ((mask >> i & 1) == 0) values[i] = 0;
  }
  return values;
}
// Halves with each other, then halves of these, …, as GCC and Clang do it.
RAY_HETERO_CALLED float _mm512_reduce_add_ps(__m512 values) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) values[i] = values[i + half] + values[i];
  }
  return values[0];
}
RAY_HETERO_CALLED float _mm512_reduce_max_ps(__m512 values) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      values[i] = values[i + half] > values[i] ? values[i + half] : values[i];
    }
  }
  return values[0];
}
RAY_HETERO_CALLED __m512 _mm512_roundscale_ps(__m512 values, int how) {
  if ((how & ~_MM_FROUND_NO_EXC) != _MM_FROUND_TO_NEAREST_INT) {
    fail("VRNDSCALEPS is here for the nearest integers only");
  }
  for (int i = 0; i < 16; ++i) values[i] = __builtin_nearbyintf(values[i]);
  return values;
}
// a · 2^⌊b⌋, rounded once.
inline float scaled_by_power(float a, float b) {
  // An infinite power has its own result where the other operand is a quiet NaN (the manual's table of
  // VSCALEFPS).
  const bool is_quiet = std::isnan(a) && (bits_of(a) & 0x400000) != 0;
  if (is_quiet && std::isinf(b)) return b > 0 ? b : 0.0f;
  if (std::isnan(a) || std::isnan(b)) return a + b;
  if (std::isinf(b)) {
    if (b > 0) return a == 0 ? __builtin_nanf("") : a * b;
    return std::isinf(a) ? __builtin_nanf("") : std::copysign(0.0f, a);
  }
  // Beyond ±400 the result is zero or infinite whatever a is.
  const float power = std::floor(b);
  const int within = power > 400 ? 400 : power < -400 ? -400 : static_cast<int>(power);
  const std::uint64_t bits = static_cast<std::uint64_t>(1023 + within) << 52;
  return static_cast<float>(static_cast<double>(a) * loaded<double>(&bits));
}
RAY_HETERO_CALLED __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
  for (int i = 0; i < 16; ++i) a[i] = scaled_by_power(a[i], b[i]);
  return a;
}
RAY_HETERO_CALLED __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int predicate) {
  if (predicate != _CMP_UNORD_Q) fail("VCMPPS is here for \"one is NaN\" only");
  __mmask16 mask = 0;
  for (int i = 0; i < 16; ++i) {
    mask = static_cast<__mmask16>(mask | (__builtin_isunordered(a[i], b[i]) << i));
  }
  return mask;
}

// ---- arithmetic of integers -----------------------------------------------------------------------

inline __m512i _mm512_add_epi32(__m512i a, __m512i b) { return (__m512i)((Words32)a + (Words32)b); }
inline __m512i _mm512_add_epi16(__m512i a, __m512i b) { return (__m512i)((Words16)a + (Words16)b); }
inline __m512i _mm512_mullo_epi32(__m512i a, __m512i b) {
  return (__m512i)((Words32)a * (Words32)b);
}
inline __m512i _mm512_min_epi32(__m512i a, __m512i b) {
  return (__m512i)((Signed32)a < (Signed32)b ? (Signed32)a : (Signed32)b);
}
inline __m512i _mm512_max_epu32(__m512i a, __m512i b) {
  return (__m512i)((Words32)a > (Words32)b ? (Words32)a : (Words32)b);
}
inline __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
inline __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
RAY_HETERO_CALLED __m512i _mm512_mask_or_epi32(__m512i other, __mmask16 mask, __m512i a, __m512i b) {
  auto found = (Words32)other;
  const auto both = (Words32)(a | b);
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) found[i] = both[i];
  }
  return (__m512i)found;
}
// Bit `4 · a + 2 · b + c` of the table for each of their bits.
inline __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  __m512i found{};
  for (int number = 0; number < 8; ++number) {
    if ((table >> number & 1) == 0) continue;
    found |= (number & 4 ? a : ~a) & (number & 2 ? b : ~b) & (number & 1 ? c : ~c);
  }
  return found;
}
RAY_HETERO_CALLED __mmask64 _mm512_testn_epi8_mask(__m512i a, __m512i b) {
  const auto both = (Bytes)(a & b);
  __mmask64 mask = 0;
  for (int i = 0; i < 64; ++i) mask |= static_cast<__mmask64>(both[i] == 0) << i;
  return mask;
}
RAY_HETERO_CALLED __mmask32 _mm512_testn_epi16_mask(__m512i a, __m512i b) {
  const auto both = (Words16)(a & b);
  __mmask32 mask = 0;
  for (int i = 0; i < 32; ++i) mask |= static_cast<__mmask32>(both[i] == 0) << i;
  return mask;
}

// Counts as large as a lane leave nothing, or the sign.
template <typename Of>
inline __m512i moved_up(__m512i values, unsigned count) {
  return count < 8 * sizeof(((Of)values)[0]) ? (__m512i)((Of)values << static_cast<int>(count))
                                             : __m512i{};
}
template <typename Of>
inline __m512i moved_down(__m512i values, unsigned count) {
  return count < 8 * sizeof(((Of)values)[0]) ? (__m512i)((Of)values >> static_cast<int>(count))
                                             : __m512i{};
}
inline __m512i _mm512_slli_epi32(__m512i values, unsigned count) {
  return moved_up<Words32>(values, count);
}
inline __m512i _mm512_slli_epi16(__m512i values, unsigned count) {
  return moved_up<Words16>(values, count);
}
inline __m512i _mm512_srli_epi32(__m512i values, unsigned count) {
  return moved_down<Words32>(values, count);
}
inline __m512i _mm512_srli_epi16(__m512i values, unsigned count) {
  return moved_down<Words16>(values, count);
}
inline __m512i _mm512_srai_epi32(__m512i values, unsigned count) {
  return moved_down<Signed32>(values, count < 32 ? count : 31);
}
inline __m512i _mm512_srai_epi16(__m512i values, unsigned count) {
  return moved_down<Signed16>(values, count < 16 ? count : 15);
}

// ---- orders of lanes ------------------------------------------------------------------------------

// Within each quarter of the register; a number with its highest bit gives 0.
RAY_HETERO_CALLED __m512i _mm512_shuffle_epi8(__m512i values, __m512i numbers) {
  const auto from = (Bytes)values, which = (Bytes)numbers;
  Bytes found;
  for (int i = 0; i < 64; ++i) {
    found[i] = which[i] & 0x80 ? 0 : from[i / 16 * 16 + (which[i] & 15)];
  }
  return (__m512i)found;
}
// In turns, the lower or upper halves of each quarter.
RAY_HETERO_CALLED __m512i in_turns(__m512i a, __m512i b, int from) {
  const auto first = (Bytes)a, second = (Bytes)b;
  Bytes found;
  for (int i = 0; i < 64; ++i) {
    const int at = i / 16 * 16 + from + i % 16 / 2;
    found[i] = i % 2 == 0 ? first[at] : second[at];
  }
  return (__m512i)found;
}
inline __m512i _mm512_unpacklo_epi8(__m512i a, __m512i b) { return in_turns(a, b, 0); }
inline __m512i _mm512_unpackhi_epi8(__m512i a, __m512i b) { return in_turns(a, b, 8); }
// Signed lanes as unsigned ones of half the width: a quarter of a, the same quarter of b, ….
RAY_HETERO_CALLED __m512i _mm512_packus_epi32(__m512i a, __m512i b) {
  const auto first = (Signed32)a, second = (Signed32)b;
  Words16 found;
  for (int i = 0; i < 32; ++i) {
    const int at = i / 8 * 4 + i % 4;
    const int value = i % 8 < 4 ? first[at] : second[at];
    found[i] = static_cast<std::uint16_t>(value < 0 ? 0 : value > 0xffff ? 0xffff : value);
  }
  return (__m512i)found;
}
RAY_HETERO_CALLED __m512 _mm512_permutexvar_ps(__m512i numbers, __m512 values) {
  __m512 found;
  for (int i = 0; i < 16; ++i) found[i] = values[((Words32)numbers)[i] & 15];
  return found;
}
RAY_HETERO_CALLED __m512i _mm512_permutexvar_epi64(__m512i numbers, __m512i values) {
  __m512i found;
  for (int i = 0; i < 8; ++i) found[i] = values[numbers[i] & 7];
  return found;
}
RAY_HETERO_CALLED __m512i _mm512_permutexvar_epi16(__m512i numbers, __m512i values) {
  const auto from = (Words16)values, which = (Words16)numbers;
  Words16 found;
  for (int i = 0; i < 32; ++i) found[i] = from[which[i] & 31];
  return (__m512i)found;
}
RAY_HETERO_CALLED __m512i _mm512_mask_blend_epi16(__mmask32 mask, __m512i a, __m512i b) {
  auto found = (Words16)a;
  for (int i = 0; i < 32; ++i) {
    if (mask >> i & 1) found[i] = ((Words16)b)[i];
  }
  return (__m512i)found;
}
inline __m512i _mm512_maskz_permutexvar_epi16(__mmask32 mask, __m512i numbers, __m512i values) {
  return _mm512_mask_blend_epi16(mask, __m512i{}, _mm512_permutexvar_epi16(numbers, values));
}

// ---- conversions ----------------------------------------------------------------------------------

inline __m512i _mm512_cvtepu16_epi32(__m256i values) {
  return (__m512i)__builtin_convertvector((Lanes<std::uint16_t, 32>)values, Words32);
}
inline __m512i _mm512_cvtepu8_epi16(__m256i values) {
  return (__m512i)__builtin_convertvector((Lanes<std::uint8_t, 32>)values, Words16);
}
inline __m512i _mm512_cvtepu8_epi32(__m128i values) {
  return (__m512i)__builtin_convertvector((Lanes<std::uint8_t, 16>)values, Words32);
}
RAY_HETERO_CALLED __m256i _mm512_cvtepi32_epi16(__m512i values) {
  return (__m256i)__builtin_convertvector((Words32)values, Lanes<std::uint16_t, 32>);
}
// VCVTPH2PS: denormal ones are numbers like others, a NaN becomes a quiet one.
inline float widened_half(std::uint32_t half) {
  const std::uint32_t sign = (half & 0x8000) << 16, rest = half & 0x7fff;
  if (rest >= 0x7c00) {
    return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13 | (rest > 0x7c00 ? 0x400000 : 0));
  }
  if (rest >= 0x400) return float_of(sign | ((rest << 13) + (112u << 23)));
  const float small = static_cast<float>(static_cast<int>(rest)) * 0x1p-24f;
  return sign != 0 ? -small : small;
}
RAY_HETERO_CALLED __m512 _mm512_cvtph_ps(__m256i values) {
  const auto halves = (Lanes<std::uint16_t, 32>)values;
  __m512 found;
  for (int i = 0; i < 16; ++i) found[i] = widened_half(halves[i]);
  return found;
}

// VCVTPS2PH.
RAY_HETERO_CALLED __m256i _mm512_cvtps_ph(__m512 values, int how) {
  if ((how & ~_MM_FROUND_NO_EXC) != _MM_FROUND_TO_NEAREST_INT) {
    fail("VCVTPS2PH is here for the nearest numbers only");
  }
  Lanes<std::uint16_t, 32> found;
  for (int i = 0; i < 16; ++i) found[i] = as_half(values[i]);
  return (__m256i)found;
}

// ---- bf16 (AVX512-BF16) ---------------------------------------------------------------------------

// VCVTNEPS2BF16: the nearest, the even one of two; denormal ones are flushed, NaN become quiet.
RAY_HETERO_CALLED __m256bh _mm512_cvtneps_pbh(__m512 values) {
  const auto bits = (Words32)values;
  const Words32 rounded = (bits + ((bits >> 16 & 1) + 0x7fff)) >> 16;
  const Words32 magnitude = bits & 0x7fffffff;
  const Words32 quiet = bits >> 16 | 0x40, sign = bits >> 16 & 0x8000;
  const Words32 found = magnitude > 0x7f800000 ? quiet : magnitude < 0x800000 ? sign : rounded;
  return (__m256bh)_mm512_cvtepi32_epi16((__m512i)found);
}
// VCVTNE2PS2BF16: the second operand's are the lower half.
inline __m512bh _mm512_cvtne2ps_pbh(__m512 upper, __m512 lower) {
  const __m256bh both[2] = {_mm512_cvtneps_pbh(lower), _mm512_cvtneps_pbh(upper)};
  return loaded<__m512bh>(both);
}
// One step of VDPBF16PS and TDPBF16PS: rounded once to the nearest; denormal operands and results are
// zeros, whatever MXCSR says.  A result is denormal where it would be after it was rounded to 24 bits with
// an exponent without limits.
inline float multiplied_and_added(float a, float b, float sum) {
  const float left = flushed(a), right = flushed(b), addend = flushed(sum);
  const float rounded = flushed(__builtin_fmaf(left, right, addend));
  if (std::fabs(rounded) != FLT_MIN) return rounded;
  // The product of two bf16 numbers is a double, and what their sum with a float loses is one too.
  const double product = static_cast<double>(left) * right, wide = product + addend;
  const double back = wide - product, lost = (product - (wide - back)) + (addend - back);
  // What is nearer to the smallest normal number than to the one below it of 24 bits, becomes it.
  const double least = FLT_MIN - 0x1p-151, size = std::fabs(wide);
  const bool is_tiny = size < least || (size == least && wide * lost < 0);
  return is_tiny ? std::copysign(0.0f, rounded) : rounded;
}
// VDPBF16PS: the product of the upper halves first, then that of the lower ones.
RAY_HETERO_CALLED __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
  std::uint32_t left[16], right[16];
  float sum[16];
  std::memcpy(left, &a, sizeof(a));
  std::memcpy(right, &b, sizeof(b));
  std::memcpy(sum, &sums, sizeof(sums));
  for (int i = 0; i < 16; ++i) {
    sum[i] = multiplied_and_added(float_of(left[i] & 0xffff0000), float_of(right[i] & 0xffff0000),
                                  sum[i]);
    sum[i] = multiplied_and_added(float_of(left[i] << 16), float_of(right[i] << 16), sum[i]);
  }
  return loaded<__m512>(sum);
}

}  // namespace ray_hetero::emulated

// Compares emulated instructions with those of this processor, bit by bit.
//
//     g++ -std=c++17 -O1 -ffp-contract=off -fopenmp -Wno-psabi -Icsrc/kernels -Itests/native
//       tests/native/compare_intrinsics.cpp -o compare_intrinsics
//
// Prints a line for each set of instructions that was compared: AVX-512, AVX512-BF16 and AMX where they
// are here, and for AVX2, by halves, what has instructions of that width.  The exit status is 1 if one
// differs.  With the argument `tiles`, uses tiles that were not set up.

#include "kernels.h"
#include "processor.h"

#include <random>
#include <set>

#include "emulated/target.h"
#include "emulated/amx.h"
#include "emulated/avx512.h"

namespace ray_hetero {
namespace emulated {
#include "emulated/cases.h"
}

namespace {

constexpr int kRounds = 20000;

struct Result {
  std::string name;
  bool is_floats;
  std::vector<unsigned char> bytes;
};

// Takes results, of emulated instructions or of the processor's.
struct Results {
  std::vector<Result> all;

  template <typename T>
  void operator()(const char* name, const T& value, bool is_floats) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(&value);
    all.push_back({name, is_floats, {bytes, bytes + sizeof(value)}});
  }
};

// Which NaN an operation gives is its own affair.
bool is_same(const Result& one, const Result& other) {
  if (!one.is_floats) return one.bytes == other.bytes;
  for (std::size_t at = 0; at < one.bytes.size(); at += sizeof(float)) {
    const auto left = emulated::loaded<float>(&one.bytes[at]);
    const auto right = emulated::loaded<float>(&other.bytes[at]);
    const bool are_nan = std::isnan(left) && std::isnan(right);
    if (!are_nan && emulated::bits_of(left) != emulated::bits_of(right)) return false;
  }
  return true;
}

class Comparison {
 public:
  explicit Comparison(const char* set) : set_(set) {}
  ~Comparison() {
    if (names_.empty()) return;
    std::printf("%s: %zu instructions compared, %zu differ\n", set_, names_.size(), wrong_.size());
  }

  void add(const Results& emulated, const Results& real) {
    for (std::size_t i = 0; i < emulated.all.size(); ++i) {
      const Result& one = emulated.all[i];
      names_.insert(one.name);
      if (!is_same(one, real.all[i]) && wrong_.insert(one.name).second) {
        std::printf("%s: %s differs: emulated", set_, one.name.c_str());
        for (const unsigned char byte : one.bytes) std::printf(" %02x", byte);
        std::printf(", of the processor");
        for (const unsigned char byte : real.all[i].bytes) std::printf(" %02x", byte);
        std::printf("\n");
      }
    }
  }
  bool is_right() const { return wrong_.empty(); }

 private:
  const char* set_;
  std::set<std::string> names_, wrong_;
};

// Bits of any kind, floats of usual sizes, and what is special in float32 and in bf16.
void fill(std::mt19937_64& random, unsigned char* given) {
  static const std::uint32_t special[] = {
      0x00000000, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00001, 0x7f800001, 0x00000001, 0x807fffff,
      0x00800000, 0x7f7fffff, 0x3f808000, 0x3f818000, 0x3f80ffff, 0x00010001, 0x00807f80, 0x3effffff,
      0x4b000001, 0x3f000000, 0xc0200000, 0x477fe000};
  std::normal_distribution<float> usual;
  for (int i = 0; i < 48; ++i) {
    std::uint32_t bits = static_cast<std::uint32_t>(random());
    const auto kind = random() % 4;
    if (kind == 0) bits = special[random() % std::size(special)];
    if (kind == 1) bits = emulated::bits_of(usual(random));
    // A pair of usual bf16.
    if (kind == 2) {
      bits = emulated::bits_of(usual(random)) >> 16 | (emulated::bits_of(usual(random)) & 0xffff0000);
    }
    std::memcpy(given + 4 * i, &bits, sizeof(bits));
  }
}

// Operands of VDPBF16PS whose sums are next to the smallest normal number.
void fill_tiny(std::mt19937_64& random, unsigned char* given) {
  for (int i = 0; i < 48; ++i) {
    const auto bits = static_cast<std::uint32_t>(random());
    // Factors of 2^-78 to 2^-71.
    std::uint32_t made = (bits & 0x83ff83ff) + 0x18801880;
    if (i / 16 == 1) made = (bits & 0x80000000) | (0x007ffffe + bits % 5);
    std::memcpy(given + 4 * i, &made, sizeof(made));
  }
}

#if defined(__x86_64__)

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
namespace of_processor {
#include "emulated/cases.h"

void compute(const unsigned char* given, Results& results) { run_cases(given, results); }
void compute_bf16(const unsigned char* given, Results& results) { run_bf16_cases(given, results); }
}  // namespace of_processor
#pragma GCC pop_options

bool compare_avx512() {
  std::mt19937_64 random(1);
  alignas(64) unsigned char given[192];
  Comparison plain("AVX-512"), bf16("AVX512-BF16");
  for (int round = 0; round < kRounds; ++round) {
    fill(random, given);
    Results emulated_ones, real;
    emulated::run_cases(given, emulated_ones);
    of_processor::compute(given, real);
    plain.add(emulated_ones, real);
    if (!has_avx512_bf16()) continue;
    if (round % 4 == 0) fill_tiny(random, given);
    Results emulated_bf16, real_bf16;
    emulated::run_bf16_cases(given, emulated_bf16);
    of_processor::compute_bf16(given, real_bf16);
    bf16.add(emulated_bf16, real_bf16);
  }
  return plain.is_right() && bf16.is_right();
}

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
// An emulated instruction, and that of half the width for each half of the operands.
#define HALVES(name, is_floats, emulated_one, half_one)                       \
  {                                                                           \
    const auto whole = emulated_one;                                          \
    emulated_ones(name, whole, is_floats);                                    \
    alignas(64) unsigned char both[64];                                       \
    for (int half = 0; half < 2; ++half) {                                    \
      const __m256 a = _mm256_loadu_ps(floats + 8 * half);                    \
      const __m256 b = _mm256_loadu_ps(floats + 16 + 8 * half);               \
      const __m256 c = _mm256_loadu_ps(floats + 32 + 8 * half);               \
      const __m256i i = _mm256_castps_si256(a), j = _mm256_castps_si256(b);   \
      (void)a, (void)b, (void)c, (void)i, (void)j;                            \
      const auto made = half_one;                                             \
      std::memcpy(both + 32 * half, &made, sizeof(made));                     \
    }                                                                         \
    real(name, both, is_floats);                                              \
  }
#define OF_INTEGERS(name) \
  HALVES("_mm512_" #name, false, emulated::_mm512_##name(x, y), _mm256_##name(i, j))
#define OF_FLOATS(name) \
  HALVES("_mm512_" #name, true, emulated::_mm512_##name(p, q), _mm256_##name(a, b))
#define OF_COUNT(name, count) \
  HALVES("_mm512_" #name, false, emulated::_mm512_##name(x, count), _mm256_##name(i, count))
void compute_halves(const unsigned char* given, Results& emulated_ones, Results& real) {
  float floats[48];
  std::memcpy(floats, given, sizeof(floats));
  const auto p = emulated::_mm512_loadu_ps(given), q = emulated::_mm512_loadu_ps(given + 64);
  const auto r = emulated::_mm512_loadu_ps(given + 128);
  const auto x = emulated::_mm512_loadu_si512(given), y = emulated::_mm512_loadu_si512(given + 64);
  OF_INTEGERS(add_epi32) OF_INTEGERS(add_epi16) OF_INTEGERS(mullo_epi32) OF_INTEGERS(min_epi32)
  OF_INTEGERS(max_epu32) OF_INTEGERS(shuffle_epi8) OF_INTEGERS(unpacklo_epi8)
  OF_INTEGERS(unpackhi_epi8) OF_INTEGERS(packus_epi32)
  OF_FLOATS(add_ps) OF_FLOATS(sub_ps) OF_FLOATS(mul_ps) OF_FLOATS(div_ps)
  OF_COUNT(slli_epi32, 7) OF_COUNT(slli_epi32, 32) OF_COUNT(slli_epi16, 8) OF_COUNT(slli_epi16, 16)
  OF_COUNT(srli_epi32, 9) OF_COUNT(srli_epi32, 40) OF_COUNT(srli_epi16, 4) OF_COUNT(srli_epi16, 17)
  OF_COUNT(srai_epi32, 3) OF_COUNT(srai_epi32, 32) OF_COUNT(srai_epi16, 1) OF_COUNT(srai_epi16, 16)
  HALVES("_mm512_mask_max_ps", true, emulated::_mm512_mask_max_ps(r, 0xffff, p, q),
         _mm256_max_ps(a, b))
  HALVES("_mm512_fmadd_ps", true, emulated::_mm512_fmadd_ps(p, q, r), _mm256_fmadd_ps(a, b, c))
  HALVES("_mm512_fmsub_ps", true, emulated::_mm512_fmsub_ps(p, q, r), _mm256_fmsub_ps(a, b, c))
  HALVES("_mm512_roundscale_ps", true, emulated::_mm512_roundscale_ps(p, 8),
         _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
  HALVES("_mm512_cvtph_ps", true,
         emulated::_mm512_cvtph_ps(emulated::_mm512_extracti64x4_epi64(x, 0)),
         _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(given + 16 * half))))
  HALVES("_mm512_cvtepu8_epi32", false,
         emulated::_mm512_cvtepu8_epi32(
             emulated::_mm_loadu_si128(reinterpret_cast<const emulated::__m128i*>(given))),
         _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(given + 8 * half))))
  HALVES("_mm512_cvtepu16_epi32", false,
         emulated::_mm512_cvtepu16_epi32(emulated::_mm512_extracti64x4_epi64(x, 0)),
         _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(given + 16 * half))))
}
#pragma GCC pop_options

bool compare_avx2() {
  std::mt19937_64 random(2);
  alignas(64) unsigned char given[192];
  Comparison halves("AVX2");
  for (int round = 0; round < kRounds; ++round) {
    fill(random, given);
    Results emulated_ones, real;
    compute_halves(given, emulated_ones, real);
    halves.add(emulated_ones, real);
  }
  return halves.is_right();
}

}  // namespace
}  // namespace ray_hetero

#define RAY_HETERO_LEVEL of_tiles
#include "tiles/amx.h"
#undef RAY_HETERO_LEVEL

namespace ray_hetero {
namespace {

// Sums of a tile and of a smaller one, for a number of tokens.
#define RUN_TILES(from)                                   \
  from::set_tiles(TileConfig(tokens));                    \
  from::load_tile<0>(sums, 64);                           \
  from::load_tile<4>(x, 64);                              \
  from::load_tile<6>(w, 64);                              \
  from::multiply_tiles<0, 4, 6>();                        \
  from::clear_tile<1>();                                  \
  from::multiply_tiles<1, 4, 6>();                        \
  from::store_tile<0>(made, 64);                          \
  from::store_tile<1>(made + 1024, 64);                   \
  from::release_tiles();
void run_emulated_tiles(int tokens, const unsigned char* sums, const unsigned char* x,
                        const unsigned char* w, unsigned char* made) {
  RUN_TILES(emulated)
}
void run_tiles(int tokens, const unsigned char* sums, const unsigned char* x,
               const unsigned char* w, unsigned char* made) {
  RUN_TILES(of_tiles)
}

bool compare_amx() {
  std::mt19937_64 random(3);
  static unsigned char given[3 * 1152];
  Comparison tiles("AMX");
  for (int round = 0; round < kRounds / 20; ++round) {
    for (int at = 0; at + 192 <= 3 * 1152; at += 192) fill(random, given + at);
    unsigned char mine[2048] = {}, real[2048] = {};
    const int tokens = 1 + round % 16;
    run_emulated_tiles(tokens, given, given + 1024, given + 2048, mine);
    run_tiles(tokens, given, given + 1024, given + 2048, real);
    Results one, other;
    one("TDPBF16PS", mine, true);
    other("TDPBF16PS", real, true);
    tiles.add(one, other);
  }
  return tiles.is_right();
}

#endif

// What the manual says of roundings, in numbers.
bool check_bf16() {
  using namespace emulated;
  const std::uint32_t given[16] = {0x3f808000, 0x3f818000, 0x3f808001, 0x3f807fff, 0x007fffff,
                                   0x80000001, 0x7f7fffff, 0xff800000, 0x7f800001, 0x00800000};
  const std::uint16_t expected[10] = {0x3f80, 0x3f82, 0x3f81, 0x3f80, 0x0000,
                                      0x8000, 0x7f80, 0xff80, 0x7fc0, 0x0080};
  const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(given));
  bool is_right = std::memcmp(&rounded, expected, sizeof(expected)) == 0;
  // Upper products come first: 2^30 · 1 - 2^30 · 1 + 1 is 0 or 1 by the order.
  const auto product = [](float sum, std::uint32_t x, std::uint32_t w) {
    return _mm512_dpbf16_ps(_mm512_set1_ps(sum), (__m512bh)_mm512_set1_epi32(static_cast<int>(x)),
                            (__m512bh)_mm512_set1_epi32(static_cast<int>(w)))[0];
  };
  is_right &= product(1, 0x4e804e80, 0x3f80bf80) == 0;    // (1 - 2^30) + 2^30
  is_right &= product(-0x1p30f, 0x4e803f80, 0x3f803f80) == 1;  // (-2^30 + 2^30) + 1
  is_right &= product(-0x1p30f, 0x3f804e80, 0x3f803f80) == 0;  // (-2^30 + 1) + 2^30
  // Denormal operands and results are zeros.
  is_right &= product(0, 0x00000001, 0x00007f00) == 0;
  is_right &= product(0x1p-130f, 0, 0) == 0;
  is_right &= product(0, 0x00000080, 0x00003f00) == 0;
  // Next to 2^-126: less 2^-151 is rounded up to it, less a little more is denormal.
  is_right &= product(0x1p-126f, 0x00001a00, 0x00009980) == 0x1p-126f;
  is_right &= product(0x1p-126f, 0x00001a00, 0x00009981) == 0;
  std::printf("bf16 as the manual has it: %s\n", is_right ? "right" : "WRONG");
  return is_right;
}

int compared() {
  bool is_right = check_bf16();
#if defined(__x86_64__)
  if (has_avx2()) is_right &= compare_avx2();
  if (has_avx512()) is_right &= compare_avx512();
  if (has_amx()) is_right &= compare_amx();
#endif
  return is_right ? 0 : 1;
}

}  // namespace
}  // namespace ray_hetero

int main(int count, char** arguments) {
  if (count > 1 && std::string(arguments[1]) == "tiles") {
    unsigned char room[1024];
    ray_hetero::emulated::store_tile<0>(room, 64);
    return 0;
  }
  return ray_hetero::compared();
}

// A checkpoint's weights in the order in which kernels read them: blocks of 32 outputs, of which each
// has all its codes and then its scales by group (formats/scaled.h).

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace ray_hetero {

// Outputs of a block.
constexpr std::int64_t kArranged = 32;

// Stored rows that become a block, by output.
struct BlockRowsStored {
  const std::uint8_t* codes[kArranged];
  const std::uint8_t* scales[kArranged];  // not read where there are no groups
};

// Sizes that all blocks of a matrix share.
struct ArrangedSizes {
  int bits;                  // of a code: 4, 8, or 16 for bf16
  std::int64_t inputs;       // a multiple of 32
  std::int64_t groups;       // of inputs with a scale
  std::int64_t scale_bytes;  // 1, 2 or 4
  std::int64_t block_bytes;

  std::int64_t row_bytes() const { return inputs * bits / 8; }
  std::int64_t used() const { return kArranged * (row_bytes() + groups * scale_bytes); }
};

// Eight words of four bytes, neighbours in a lane.
#ifdef __SSE2__
struct EightWords {
  __m128i half[2];
};

inline __m128i load_16_bytes(const std::uint8_t* at) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
}

// Write the words of four lanes; those of a lane are `stride` bytes from one to the next.
inline void store_lanes(const EightWords* lanes, std::int64_t stride, std::uint8_t* to) {
  for (int half = 0; half < 2; ++half) {
    const __m128i a = _mm_unpacklo_epi32(lanes[0].half[half], lanes[1].half[half]);
    const __m128i b = _mm_unpacklo_epi32(lanes[2].half[half], lanes[3].half[half]);
    const __m128i c = _mm_unpackhi_epi32(lanes[0].half[half], lanes[1].half[half]);
    const __m128i d = _mm_unpackhi_epi32(lanes[2].half[half], lanes[3].half[half]);
    const __m128i words[4] = {_mm_unpacklo_epi64(a, b), _mm_unpackhi_epi64(a, b),
                              _mm_unpacklo_epi64(c, d), _mm_unpackhi_epi64(c, d)};
    for (int word = 0; word < 4; ++word) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + (4 * half + word) * stride), words[word]);
    }
  }
}
#else
struct EightWords {
  std::uint32_t word[8];
};

inline void store_lanes(const EightWords* lanes, std::int64_t stride, std::uint8_t* to) {
  for (int word = 0; word < 8; ++word) {
    for (int lane = 0; lane < 4; ++lane) {
      std::memcpy(to + word * stride + 4 * lane, lanes[lane].word + word, 4);
    }
  }
}
#endif

// Codes of four bits, two in a byte, of outputs `lane` and `lane` + 16: see formats/fp4.h.
struct NibbleLanes {
  static constexpr int kLanes = 16, kBytes = 16;  // of a row, for eight words
  const BlockRowsStored& rows;

  EightWords eight(int lane, std::int64_t at) const {
    const std::uint8_t *left = rows.codes[lane] + at, *right = rows.codes[lane + 16] + at;
#ifdef __SSE2__
    const __m128i l = load_16_bytes(left), r = load_16_bytes(right), lower = _mm_set1_epi8(0x0f);
    const __m128i low = _mm_or_si128(_mm_and_si128(l, lower),
                                     _mm_slli_epi16(_mm_and_si128(r, lower), 4));
    const __m128i high = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(l, 4), lower),
                                      _mm_andnot_si128(lower, r));
    return {{_mm_unpacklo_epi16(low, high), _mm_unpackhi_epi16(low, high)}};
#else
    EightWords words;
    for (int i = 0; i < 8; ++i) {
      std::uint16_t l, r;
      std::memcpy(&l, left + 2 * i, 2);
      std::memcpy(&r, right + 2 * i, 2);
      const std::uint32_t low = (l & 0x0f0fu) | (r & 0x0f0fu) << 4;
      const std::uint32_t high = (l >> 4 & 0x0f0fu) | (r & 0xf0f0u);
      words.word[i] = low | high << 16;
    }
    return words;
#endif
  }
};

// Codes of eight bits, of outputs `lane` and `lane` + 16: see formats/fp8.h.
struct ByteLanes {
  static constexpr int kLanes = 16, kBytes = 16;
  const BlockRowsStored& rows;

  EightWords eight(int lane, std::int64_t at) const {
    const std::uint8_t *left = rows.codes[lane] + at, *right = rows.codes[lane + 16] + at;
#ifdef __SSE2__
    const __m128i l = load_16_bytes(left), r = load_16_bytes(right);
    return {{_mm_unpacklo_epi8(l, r), _mm_unpackhi_epi8(l, r)}};
#else
    EightWords words;
    for (int i = 0; i < 8; ++i) {
      const std::uint8_t both[4] = {left[2 * i], right[2 * i], left[2 * i + 1], right[2 * i + 1]};
      std::memcpy(words.word + i, both, 4);
    }
    return words;
#endif
  }
};

// Weights in bf16, two neighbouring inputs of an output in a word: see formats/packed.h.
struct HalfLanes {
  static constexpr int kLanes = 32, kBytes = 32;
  const BlockRowsStored& rows;

  EightWords eight(int lane, std::int64_t at) const {
    EightWords words;
    std::memcpy(&words, rows.codes[lane] + at, sizeof(words));
    return words;
  }
};

// Codes of a block.  Of a row a cache line is read at once: rows of many sizes share their places in
// the cache.
template <typename Lanes>
void arrange_lanes(const Lanes& lanes, std::int64_t row_bytes, std::uint8_t* to) {
  constexpr std::int64_t kLine = 64, kStride = 4 * Lanes::kLanes;
  for (std::int64_t line = 0; line < row_bytes; line += kLine) {
    const std::int64_t end = line + kLine < row_bytes ? line + kLine : row_bytes;
    for (int lane = 0; lane < Lanes::kLanes; lane += 4) {
      for (std::int64_t at = line; at < end; at += Lanes::kBytes) {
        EightWords four[4];
        for (int one = 0; one < 4; ++one) four[one] = lanes.eight(lane + one, at);
        store_lanes(four, kStride, to + at / Lanes::kBytes * 8 * kStride + 4 * lane);
      }
    }
  }
}

template <typename Scale>
void arrange_scales(const BlockRowsStored& rows, std::int64_t groups, std::uint8_t* to) {
  for (std::int64_t one = 0; one < kArranged; ++one) {
    for (std::int64_t group = 0; group < groups; ++group) {
      std::memcpy(to + sizeof(Scale) * (group * kArranged + one),
                  rows.scales[one] + sizeof(Scale) * group, sizeof(Scale));
    }
  }
}

// A block of `sizes.block_bytes`.
inline void arrange_block(const BlockRowsStored& rows, const ArrangedSizes& sizes,
                          std::uint8_t* to) {
  if (sizes.bits == 4) {
    arrange_lanes(NibbleLanes{rows}, sizes.row_bytes(), to);
  } else if (sizes.bits == 8) {
    arrange_lanes(ByteLanes{rows}, sizes.row_bytes(), to);
  } else {
    arrange_lanes(HalfLanes{rows}, sizes.row_bytes(), to);
  }
  std::uint8_t* scales = to + kArranged * sizes.row_bytes();
  if (sizes.scale_bytes == 1) {
    arrange_scales<std::uint8_t>(rows, sizes.groups, scales);
  } else if (sizes.scale_bytes == 2) {
    arrange_scales<std::uint16_t>(rows, sizes.groups, scales);
  } else {
    arrange_scales<std::uint32_t>(rows, sizes.groups, scales);
  }
  std::memset(to + sizes.used(), 0, static_cast<std::size_t>(sizes.block_bytes - sizes.used()));
}

// Matrix of codes and its scales in memory, an output after the other.
struct StoredCodes {
  const std::uint8_t* codes;
  std::int64_t code_stride;  // bytes from one output to the next
  const std::uint8_t* scales;
  std::int64_t scale_stride;
};

// Blocks of a matrix; `outputs` has for each output the stored one that takes its place.
inline void arrange(const StoredCodes& stored, const ArrangedSizes& sizes,
                    const std::int64_t* outputs, std::int64_t count, std::uint8_t* to) {
  for (std::int64_t block = 0; block < count / kArranged; ++block) {
    BlockRowsStored rows;
    for (std::int64_t one = 0; one < kArranged; ++one) {
      const std::int64_t output = outputs[block * kArranged + one];
      rows.codes[one] = stored.codes + output * stored.code_stride;
      rows.scales[one] = stored.scales + output * stored.scale_stride;
    }
    arrange_block(rows, sizes, to + block * sizes.block_bytes);
  }
}

}  // namespace ray_hetero

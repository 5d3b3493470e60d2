// Compact weights [N, K] of linear layers in host memory: bf16 in 12 bits each, without loss.
//
// The upper byte of a bf16 is its sign and
// most of its exponent, and trained weights have few of these: 15 of them and 0 cover all but one
// weight in thousands.  Two rows of 64 weights are 192 bytes: the 64 lower bytes of the one, those
// of the other, then a byte for both of them with their upper bytes' codes, places in a codebook of 16.
// A weight whose upper byte is not in the codebook is held as 0 there and as it is in a list.
// That most of a bf16's exponents carry little information is known from Zhang et al., "70% Size,
// 100% Accuracy: Lossless LLM Compression for Efficient GPU Inference via Dynamic-Length Float",
// 2025; lengths are fixed here, so that a row costs its reader six instructions.

#pragma once

#include "../vectors.h"
#include "packed.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

namespace ray_hetero {

constexpr int kCompactPair = 3 * kRow;  // bytes of two compact rows
constexpr int kCodebook = 16;            // upper bytes; code 0 is 0

// One weight of a block whose upper byte is not in the codebook.
struct Outlier {
  std::uint32_t k;
  std::uint16_t output;  // of the block
  std::uint16_t value;   // bf16
};

// Where element e of a row is among its 64 bytes: VPUNPCKLBW and VPUNPCKHBW then give both halves.
constexpr int compact_place(int e) {
  const int half = e / kBlock, in_half = e % kBlock;
  return in_half / 8 * 16 + half * 8 + in_half % 8;
}

// What belongs to a compact weight beside its rows.
class Compact {
 public:
  // Write packed rows [n / 32][k / 2][32][2] as compact ones.
  Compact(const std::uint16_t* packed, std::int64_t n, std::int64_t k, std::uint8_t* rows)
      : blocks_(n / kBlock), pairs_(k / 2), first_(blocks_ + 1) {
    make_codebook(packed);
    std::vector<std::vector<Outlier>> found(blocks_);
#pragma omp parallel for schedule(static)
    for (std::int64_t block = 0; block < blocks_; ++block) {
      write_block(packed + block * pairs_ * kRow, rows + block * pairs_ / 2 * kCompactPair,
                  found[block]);
    }
    for (std::int64_t block = 0; block < blocks_; ++block) {
      first_[block + 1] = first_[block] + static_cast<std::int64_t>(found[block].size());
    }
    outliers_.reserve(first_[blocks_]);
    for (const auto& some : found) outliers_.insert(outliers_.end(), some.begin(), some.end());
  }

  const std::array<std::uint8_t, kCodebook>& codebook() const { return codebook_; }
  std::int64_t blocks() const { return blocks_; }
  std::int64_t outliers() const { return first_[blocks_]; }
  std::int64_t inputs() const { return 2 * pairs_; }
  const Outlier* begin(std::int64_t block) const { return outliers_.data() + first_[block]; }
  const Outlier* end(std::int64_t block) const { return begin(block + 1); }

 private:
  // 0 and the 15 most frequent of the others.
  void make_codebook(const std::uint16_t* packed) {
    std::array<std::int64_t, 256> counts{};
#pragma omp parallel
    {
      std::array<std::int64_t, 256> mine{};
#pragma omp for schedule(static)
      for (std::int64_t i = 0; i < blocks_ * pairs_ * kRow; ++i) ++mine[packed[i] >> 8];
#pragma omp critical
      for (int byte = 0; byte < 256; ++byte) counts[byte] += mine[byte];
    }
    std::array<std::uint8_t, 255> others;
    std::iota(others.begin(), others.end(), std::uint8_t{1});
    std::stable_sort(others.begin(), others.end(),
                     [&](int left, int right) { return counts[left] > counts[right]; });
    codebook_[0] = 0;
    std::copy_n(others.begin(), kCodebook - 1, codebook_.begin() + 1);
    codes_.fill(kNone);
    for (std::uint8_t code = 0; code < kCodebook; ++code) codes_[codebook_[code]] = code;
  }

  void write_block(const std::uint16_t* from, std::uint8_t* to,
                   std::vector<Outlier>& outliers) const {
    for (std::int64_t row = 0; row < pairs_; ++row, from += kRow) {
      const bool is_second = row % 2 != 0;
      std::uint8_t* lower = to + row / 2 * kCompactPair + (is_second ? kRow : 0);
      std::uint8_t* codes = to + row / 2 * kCompactPair + 2 * kRow;
      for (int e = 0; e < kRow; ++e) {
        const int at = compact_place(e);
        const std::uint8_t code = codes_[from[e] >> 8];
        const bool is_there = code != kNone;
        if (!is_there) {
          outliers.push_back({static_cast<std::uint32_t>(2 * row + e % 2),
                                static_cast<std::uint16_t>(e / 2), from[e]});
        }
        lower[at] = is_there ? static_cast<std::uint8_t>(from[e]) : 0;
        const auto written = static_cast<std::uint8_t>(is_there ? code : 0);
        codes[at] = is_second ? static_cast<std::uint8_t>(codes[at] | written << 4) : written;
      }
    }
  }

  static constexpr std::uint8_t kNone = 255;

  std::int64_t blocks_, pairs_;
  std::array<std::uint8_t, kCodebook> codebook_;
  std::array<std::uint8_t, 256> codes_;  // of each upper byte, or kNone
  std::vector<std::int64_t> first_;        // exception of each block
  std::vector<Outlier> outliers_;      // by block
};

#if defined(__x86_64__)

// Two rows, each as it is multiplied: 16 outputs left, 16 right.
struct TwoRows {
  __m512i left[2], right[2];
};

RAY_HETERO_BF16 inline __m512i load_codebook(const Compact& compact) {
  return _mm512_broadcast_i32x4(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(compact.codebook().data())));
}

RAY_HETERO_BF16 RAY_HETERO_INLINE TwoRows expand_two(const std::uint8_t* at, __m512i codebook) {
  const __m512i code = _mm512_set1_epi8(kCodebook - 1);
  const __m512i both = _mm512_loadu_si512(at + 2 * kRow);
  TwoRows rows;
  for (int row = 0; row < 2; ++row) {
    const __m512i codes = row == 0 ? both : _mm512_srli_epi16(both, 4);
    const __m512i upper = _mm512_shuffle_epi8(codebook, _mm512_and_si512(codes, code));
    const __m512i lower = _mm512_loadu_si512(at + row * kRow);
    rows.left[row] = _mm512_unpacklo_epi8(lower, upper);
    rows.right[row] = _mm512_unpackhi_epi8(lower, upper);
  }
  return rows;
}

// Packed rows of compact ones, an even number of them, without the outliers.
RAY_HETERO_BF16 RAY_HETERO_INLINE void expand_rows(const std::uint8_t* from, __m512i codebook,
                                                   std::int64_t rows, std::uint16_t* to) {
  for (std::int64_t row = 0; row < rows; row += 2, from += kCompactPair, to += 2 * kRow) {
    const TwoRows two = expand_two(from, codebook);
    for (int one = 0; one < 2; ++one) {
      _mm512_storeu_si512(to + one * kRow, two.left[one]);
      _mm512_storeu_si512(to + one * kRow + kBlock, two.right[one]);
    }
  }
}

#endif

}  // namespace ray_hetero

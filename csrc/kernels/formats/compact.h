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

#ifndef RAY_HETERO_FORMATS_COMPACT_H
#define RAY_HETERO_FORMATS_COMPACT_H

#include "encoding.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <vector>

namespace ray_hetero {

constexpr int kCompactPair = 3 * kRow;  // bytes of two compact rows
constexpr int kCodebook = 16;           // upper bytes; code 0 is 0

// Where element e of a row is among its 64 bytes: VPUNPCKLBW and VPUNPCKHBW then give both halves.
constexpr int compact_place(int e) {
  const int half = e / kBlock, in_half = e % kBlock;
  return in_half / 8 * 16 + half * 8 + in_half % 8;
}

// What belongs to a compact weight beside its rows.
class Compact : public Encoding {
 public:
  // Write packed rows [n / 32][k / 2][32][2] as compact ones.
  Compact(const std::uint16_t* packed, std::int64_t n, std::int64_t k, std::uint8_t* rows)
      : Encoding(Format::kCompact, n, k, kCompactPair), first_(blocks() + 1) {
    make_codebook(packed);
    std::vector<std::vector<Outlier>> found(blocks());
#pragma omp parallel for schedule(static)
    for (std::int64_t block = 0; block < blocks(); ++block) {
      write_block(packed + block * pairs() * kRow, rows + block * pairs() / 2 * kCompactPair,
                  found[block]);
    }
    for (std::int64_t block = 0; block < blocks(); ++block) {
      first_[block + 1] = first_[block] + static_cast<std::int64_t>(found[block].size());
    }
    outliers_.reserve(first_[blocks()]);
    for (const auto& some : found) outliers_.insert(outliers_.end(), some.begin(), some.end());
  }

  const std::array<std::uint8_t, kCodebook>& codebook() const { return codebook_; }
  std::int64_t outliers_count() const { return first_[blocks()]; }
  Outliers outliers(std::int64_t block) const override {
    return {outliers_.data() + first_[block], outliers_.data() + first_[block + 1]};
  }

 private:
  // 0 and the 15 most frequent of the others.
  void make_codebook(const std::uint16_t* packed) {
    std::array<std::int64_t, 256> counts{};
#pragma omp parallel
    {
      std::array<std::int64_t, 256> mine{};
#pragma omp for schedule(static)
      for (std::int64_t i = 0; i < blocks() * pairs() * kRow; ++i) ++mine[packed[i] >> 8];
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
    for (std::int64_t row = 0; row < pairs(); ++row, from += kRow) {
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

  std::array<std::uint8_t, kCodebook> codebook_;
  std::array<std::uint8_t, 256> codes_;  // of each upper byte, or kNone
  std::vector<std::int64_t> first_;      // outlier of each block
  std::vector<Outlier> outliers_;      // by block
};

}  // namespace ray_hetero

#endif

#ifdef RAY_HETERO_LEVEL

namespace ray_hetero::RAY_HETERO_LEVEL {

// Reads rows of a block, two at a time, without the outliers.
class CompactRows {
 public:
  static constexpr std::int64_t kPairBytes = kCompactPair;
  static constexpr bool kIsExpanded = false;

  RAY_HETERO_INLINE explicit CompactRows(const Stretch& stretch)
      : at_(stretch.data),
        codebook_(spread_quarter(
            static_cast<const Compact&>(stretch.encoding).codebook().data())) {}

  RAY_HETERO_INLINE const std::uint8_t* at() const { return at_; }

  RAY_HETERO_INLINE TwoRows next() {
    const Pairs both = load_pairs(at_ + 2 * kRow);
    const Pairs codes[2] = {lower_halves(both), upper_halves(both)};
    TwoRows rows;
    for (int row = 0; row < 2; ++row) {
      const Pairs upper = looked_up(codebook_, codes[row]);
      const Pairs lower = load_pairs(at_ + row * kRow);
      rows.left[row] = turns_of_first(lower, upper);
      rows.right[row] = turns_of_second(lower, upper);
    }
    at_ += kPairBytes;
    return rows;
  }

 private:
  const std::uint8_t* at_;
  const Pairs codebook_;
};

}  // namespace ray_hetero::RAY_HETERO_LEVEL

#endif

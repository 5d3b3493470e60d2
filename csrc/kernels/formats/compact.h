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
#include <memory>
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
//
// An outlier costs the thread that has its block 2 ns for one token, 7 for 8 and 60 for 32 (measured
// on one Zen 3 core, with AVX2).  That a weight is compact saves half a byte of reading, and threads
// of a full socket read some 5 bytes a nanosecond.  So with one outlier in kPerOutlier weights a block
// is as fast as a packed one for 32 tokens and faster for fewer; a block with more stays packed.
// A matrix usually has none of those, or a few: rows of an output matrix that no training has
// reached.
class Compact : public Encoding {
 public:
  static constexpr std::int64_t kPerOutlier = 512;
  static constexpr std::int64_t kPerPackedBlock = 64;

  // Write packed rows [n / 32][k / 2][32][2] as compact ones; nullptr if more blocks would stay
  // packed than one, and one in kPerPackedBlock, as these are held beside the rows.
  static std::unique_ptr<Compact> made(const std::uint16_t* packed, std::int64_t n,
                                       std::int64_t k, std::uint8_t* rows) {
    std::unique_ptr<Compact> compact(new Compact(n, k));
    if (!compact->choose(packed)) return nullptr;
    compact->write(packed, rows);
    return compact;
  }

  const std::array<std::uint8_t, kCodebook>& codebook() const { return codebook_; }
  std::int64_t outliers_count() const { return first_[blocks()]; }
  // Numbers of the blocks that stay packed.
  const std::vector<std::int64_t>& packed_blocks() const { return packed_blocks_; }

  BlockRows block(const std::uint8_t* data, std::int64_t block) const override {
    if (const std::uint16_t* packed = packed_rows(block)) {
      return {Format::kPacked, 2 * kRowBytes, reinterpret_cast<const std::uint8_t*>(packed)};
    }
    return {Format::kCompact, kCompactPair, data + block * pairs() / 2 * kCompactPair};
  }
  Outliers outliers(std::int64_t block) const override {
    return {outliers_.data() + first_[block], outliers_.data() + first_[block + 1]};
  }
  Outliers outliers_of_rows(std::int64_t block, std::int64_t row, std::int64_t rows) const override {
    const auto is_before = [](const Outlier& one, std::int64_t other) { return one.k / 2 < other; };
    const Outlier* all = by_row_.data();
    const Outlier *begin = all + first_[block], *end = all + first_[block + 1];
    begin = std::lower_bound(begin, end, row, is_before);
    return {begin, std::lower_bound(begin, end, row + rows, is_before)};
  }
  // Rows of a block that stays packed; nullptr for the others.
  const std::uint16_t* packed_rows(std::int64_t block) const {
    if (packed_blocks_.empty()) return nullptr;
    const auto found = std::lower_bound(packed_blocks_.begin(), packed_blocks_.end(), block);
    if (found == packed_blocks_.end() || *found != block) return nullptr;
    return packed_.data() + (found - packed_blocks_.begin()) * pairs() * kRow;
  }

 private:
  using Counts = std::array<std::uint32_t, 256>;  // of each upper byte in a block

  Compact(std::int64_t n, std::int64_t k) : Encoding(n, k), first_(blocks() + 1) {}

  // Decide what is an outlier, and which blocks stay packed; whether these are few.
  bool choose(const std::uint16_t* packed) {
    std::vector<Counts> counts(blocks(), Counts{});
#pragma omp parallel for schedule(static)
    for (std::int64_t block = 0; block < blocks(); ++block) {
      const std::uint16_t* from = packed + block * pairs() * kRow;
      for (std::int64_t i = 0; i < pairs() * kRow; ++i) ++counts[block][from[i] >> 8];
    }
    make_codebook(counts);
    for (std::int64_t block = 0; block < blocks(); ++block) {
      std::int64_t count = 0;
      for (int byte = 0; byte < 256; ++byte) count += codes_[byte] == kNone ? counts[block][byte] : 0;
      const bool is_packed = count * kPerOutlier > pairs() * kRow;
      if (is_packed) packed_blocks_.push_back(block);
      first_[block + 1] = first_[block] + (is_packed ? 0 : count);
    }
    return static_cast<std::int64_t>(packed_blocks_.size()) <= 1 + blocks() / kPerPackedBlock;
  }

  // 0 and the 15 most frequent of the others.
  void make_codebook(const std::vector<Counts>& counts) {
    std::array<std::int64_t, 256> all{};
    for (const Counts& some : counts) {
      for (int byte = 0; byte < 256; ++byte) all[byte] += some[byte];
    }
    std::array<std::uint8_t, 255> others;
    std::iota(others.begin(), others.end(), std::uint8_t{1});
    std::stable_sort(others.begin(), others.end(),
                     [&](int left, int right) { return all[left] > all[right]; });
    codebook_[0] = 0;
    std::copy_n(others.begin(), kCodebook - 1, codebook_.begin() + 1);
    codes_.fill(kNone);
    for (std::uint8_t code = 0; code < kCodebook; ++code) codes_[codebook_[code]] = code;
  }

  void write(const std::uint16_t* packed, std::uint8_t* rows) {
    const std::int64_t elements = pairs() * kRow;
    outliers_.resize(first_[blocks()]);
    by_row_.resize(first_[blocks()]);
    packed_.reserve(packed_blocks_.size() * elements);
    for (const std::int64_t block : packed_blocks_) {
      const std::uint16_t* from = packed + block * elements;
      packed_.insert(packed_.end(), from, from + elements);
    }
#pragma omp parallel for schedule(static)
    for (std::int64_t block = 0; block < blocks(); ++block) {
      std::uint8_t* to = rows + block * pairs() / 2 * kCompactPair;
      if (packed_rows(block) != nullptr) {
        std::fill_n(to, pairs() / 2 * kCompactPair, std::uint8_t{0});
      } else {
        write_block(packed + block * elements, to, outliers_.data() + first_[block],
                    by_row_.data() + first_[block]);
      }
    }
  }

  void write_block(const std::uint16_t* from, std::uint8_t* to, Outlier* outliers,
                   Outlier* by_row) const {
    Outlier* end = outliers;
    for (std::int64_t row = 0; row < pairs(); ++row, from += kRow) {
      const bool is_second = row % 2 != 0;
      std::uint8_t* lower = to + row / 2 * kCompactPair + (is_second ? kRow : 0);
      std::uint8_t* codes = to + row / 2 * kCompactPair + 2 * kRow;
      for (int e = 0; e < kRow; ++e) {
        const int at = compact_place(e);
        const std::uint8_t code = codes_[from[e] >> 8];
        const bool is_there = code != kNone;
        if (!is_there) {
          *end++ = {static_cast<std::uint32_t>(2 * row + e % 2), static_cast<std::uint16_t>(e / 2),
                    from[e]};
        }
        lower[at] = is_there ? static_cast<std::uint8_t>(from[e]) : 0;
        const auto written = static_cast<std::uint8_t>(is_there ? code : 0);
        codes[at] = is_second ? static_cast<std::uint8_t>(codes[at] | written << 4) : written;
      }
    }
    std::copy(outliers, end, by_row);
    std::sort(outliers, end, [](const Outlier& left, const Outlier& right) {
      return left.output != right.output ? left.output < right.output : left.k < right.k;
    });
  }

  static constexpr std::uint8_t kNone = 255;

  std::array<std::uint8_t, kCodebook> codebook_;
  std::array<std::uint8_t, 256> codes_;       // of each upper byte, or kNone
  std::vector<std::int64_t> first_;           // outlier of each block
  std::vector<Outlier> outliers_;             // by block, output and input
  std::vector<Outlier> by_row_;               // the same by block and row
  std::vector<std::int64_t> packed_blocks_;   // ascending
  std::vector<std::uint16_t> packed_;         // [packed_blocks][k / 2][32][2]
};

}  // namespace ray_hetero

#endif

#if defined(RAY_HETERO_LEVEL) && !defined(RAY_HETERO_FORMATS_COMPACT_ROWS)
#define RAY_HETERO_FORMATS_COMPACT_ROWS

#include "../read_ahead.h"
#include "../sums.h"
#include "../this_level.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

// Reads rows of a block, two at a time, without the outliers.
class CompactRows {
 public:
  static constexpr std::int64_t kPairBytes = kCompactPair;
  static constexpr bool kIsExpanded = false, kHasCodes = false;

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

#ifdef RAY_HETERO_PYTHON

namespace ray_hetero {

inline void bind(pybind11::module_& module, const Compact*) {
  namespace py = pybind11;
  py::class_<Compact, Encoding>(module, "Compact", "The same rows in 12 bits a weight.")
      .def_static(
          "made",
          [](std::uintptr_t packed, std::int64_t n, std::int64_t k, std::uintptr_t rows) {
            check_shape(n, k);
            py::gil_scoped_release release;
            return Compact::made(reinterpret_cast<const std::uint16_t*>(packed), n, k,
                                 reinterpret_cast<std::uint8_t*>(rows));
          },
          py::arg("packed"), py::arg("n"), py::arg("k"), py::arg("rows"),
          "Write packed rows, bf16, as compact ones, n · k · 3 / 2 bytes; both by address.\n"
          "None where too many of their blocks would stay packed.\n"
          "Raises ValueError: shapes that the layout cannot hold.")
      .def_property_readonly(
          "codebook",
          [](const Compact& compact) {
            return std::vector<int>(compact.codebook().begin(), compact.codebook().end());
          },
          "Upper bytes by their code.")
      .def_property_readonly("outliers_count", &Compact::outliers_count,
                             "Weights in a list, as the rows do not hold them.")
      .def_property_readonly("packed_blocks", &Compact::packed_blocks,
                             "Numbers of the blocks that stay packed: their rows hold nothing.")
      .def(
          "packed_rows",
          [](const Compact& compact, std::int64_t block) {
            const std::uint16_t* rows = compact.packed_rows(block);
            if (rows == nullptr) throw py::value_error("expected a block that stays packed");
            return py::array_t<std::uint16_t>(compact.pairs() * kRow, rows);
          },
          py::arg("block"), "Rows of a block that stays packed.  Raises ValueError: no such block.")
      .def(
          "outliers",
          [](const Compact& compact, std::int64_t first, std::int64_t last) {
            if (first < 0 || last < first || last > compact.blocks()) {
              throw py::value_error("expected a range of blocks");
            }
            std::vector<std::int64_t> places;
            std::vector<std::uint16_t> values;
            for (std::int64_t block = first; block < last; ++block) {
              for (const Outlier& one : compact.outliers(block)) {
                places.push_back(((block - first) * kBlock + one.output) * compact.k() + one.k);
                values.push_back(one.value);
              }
            }
            return std::pair(py::array_t<std::int64_t>(places.size(), places.data()),
                             py::array_t<std::uint16_t>(values.size(), values.data()));
          },
          py::arg("first"), py::arg("last"),
          "Weights of blocks `first` to `last` in the list: places in [outputs, k] of these blocks,\n"
          "values. Raises ValueError: no such blocks.");
}

}  // namespace ray_hetero

#endif

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
#include <cstring>
#include <memory>
#include <numeric>
#include <tuple>
#include <vector>

namespace ray_hetero {

constexpr int kCompactPair = 3 * kRow;  // bytes of two compact rows
constexpr int kCodebook = 16;           // upper bytes; code 0 is 0
constexpr int kNeighbours = 8;          // elements that stay together, see `compact_place`

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
    std::unique_ptr<Compact> compact = chosen(packed, n, k, false);
    if (compact != nullptr) compact->write(packed, rows, false);
    return compact;
  }
  // Choose how to write packed rows, without writing them; nullptr as above.
  //   is_alone: on this thread only, which is one of many that do so and leads none.
  static std::unique_ptr<Compact> chosen(const std::uint16_t* packed, std::int64_t n,
                                         std::int64_t k, bool is_alone) {
    std::unique_ptr<Compact> compact(new Compact(n, k));
    if (!compact->choose(packed, is_alone)) return nullptr;
    return compact;
  }
  // Write packed rows as they were chosen.
  void write(const std::uint16_t* packed, std::uint8_t* rows, bool is_alone) {
    const std::int64_t elements = pairs() * kRow;
    outliers_.resize(first_[blocks()]);
    by_row_.resize(first_[blocks()]);
    packed_.clear();
    packed_.reserve(packed_blocks_.size() * elements);
    for (const std::int64_t block : packed_blocks_) {
      const std::uint16_t* from = packed + block * elements;
      packed_.insert(packed_.end(), from, from + elements);
    }
    each_block(is_alone, [&](std::int64_t block) {
      std::uint8_t* to = rows + block * pairs() / 2 * kCompactPair;
      if (packed_rows(block) != nullptr) {
        std::fill_n(to, pairs() / 2 * kCompactPair, std::uint8_t{0});
      } else {
        write_block(packed + block * elements, to, outliers_.data() + first_[block],
                    by_row_.data() + first_[block]);
      }
    });
  }

  // All of this beside the rows, for a file on this kind of machine.
  std::vector<std::uint8_t> kept() const {
    std::vector<std::uint8_t> bytes;
    const auto add = [&](const auto* first, std::size_t count) {
      const auto* from = reinterpret_cast<const std::uint8_t*>(first);
      bytes.insert(bytes.end(), from, from + count * sizeof(*first));
    };
    const std::int64_t sizes[4] = {n(), k(), outliers_count(),
                                   static_cast<std::int64_t>(packed_blocks_.size())};
    add(sizes, 4);
    add(codebook_.data(), codebook_.size());
    add(first_.data(), first_.size());
    add(outliers_.data(), outliers_.size());
    add(packed_blocks_.data(), packed_blocks_.size());
    add(packed_.data(), packed_.size());
    return bytes;
  }
  // From such bytes; nullptr if they are none of a weight [n, k].
  static std::unique_ptr<Compact> restored(std::int64_t n, std::int64_t k,
                                           const std::uint8_t* bytes, std::size_t count) {
    std::unique_ptr<Compact> compact(new Compact(n, k));
    return compact->take(bytes, bytes + count) ? std::move(compact) : nullptr;
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

  template <typename Function>
  void each_block(bool is_alone, const Function& function) const {
    if (is_alone) {
      // OpenMP's runtime would take a thread that it does not know to its first core.
      for (std::int64_t block = 0; block < blocks(); ++block) function(block);
      return;
    }
#pragma omp parallel for schedule(static)
    for (std::int64_t block = 0; block < blocks(); ++block) function(block);
  }

  // How often each upper byte occurs.  Neighbours are often equal, and to count one up waits until
  // the last one is written: so they are counted in places of their own.
  static Counts counted(const std::uint16_t* from, std::int64_t elements) {
    std::array<Counts, 4> parts{};
    for (std::int64_t i = 0; i < elements; i += 4) {
      for (int part = 0; part < 4; ++part) ++parts[part][from[i + part] >> 8];
    }
    for (int byte = 0; byte < 256; ++byte) {
      parts[0][byte] += parts[1][byte] + parts[2][byte] + parts[3][byte];
    }
    return parts[0];
  }

  // Decide what is an outlier, and which blocks stay packed; whether these are few.
  bool choose(const std::uint16_t* packed, bool is_alone) {
    std::vector<Counts> counts(blocks());
    const std::int64_t elements = pairs() * kRow;
    each_block(is_alone, [&](std::int64_t block) {
      counts[block] = counted(packed + block * elements, elements);
    });
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

  void write_block(const std::uint16_t* from, std::uint8_t* to, Outlier* outliers,
                   Outlier* by_row) const {
    Outlier* end = outliers;
    for (std::int64_t row = 0; row < pairs(); ++row, from += kRow) {
      const bool is_second = row % 2 != 0;
      std::uint8_t* lower = to + row / 2 * kCompactPair + (is_second ? kRow : 0);
      std::uint8_t* codes = to + row / 2 * kCompactPair + 2 * kRow;
      std::uint8_t found[kRow], any = 0;
      for (int e = 0; e < kRow; ++e) any |= found[e] = codes_[from[e] >> 8];
      for (int e = 0; e < kRow; e += kNeighbours) {
        const int at = compact_place(e);
        for (int i = 0; i < kNeighbours; ++i) lower[at + i] = static_cast<std::uint8_t>(from[e + i]);
      }
      if (any == kNone) {
        for (int e = 0; e < kRow; ++e) {
          if (found[e] != kNone) continue;
          *end++ = {static_cast<std::uint32_t>(2 * row + e % 2), static_cast<std::uint16_t>(e / 2),
                    from[e]};
          lower[compact_place(e)] = found[e] = 0;
        }
      }
      for (int e = 0; e < kRow; e += kNeighbours) {
        const int at = compact_place(e);
        for (int i = 0; i < kNeighbours; ++i) {
          codes[at + i] = static_cast<std::uint8_t>(
              is_second ? codes[at + i] | found[e + i] << 4 : found[e + i]);
        }
      }
    }
    std::copy(outliers, end, by_row);
    std::sort(outliers, end, [](const Outlier& left, const Outlier& right) {
      return left.output != right.output ? left.output < right.output : left.k < right.k;
    });
  }

  // Take what `kept` has written; whether it is whole and of this size.
  bool take(const std::uint8_t* at, const std::uint8_t* end) {
    const auto read = [&](auto* first, std::int64_t count) {
      if (count < 0 || count > (end - at) / static_cast<std::int64_t>(sizeof(*first))) return false;
      // Not memcpy: of a vector without elements the address may be null.
      const auto bytes = count * static_cast<std::int64_t>(sizeof(*first));
      std::copy_n(at, bytes, reinterpret_cast<std::uint8_t*>(first));
      at += bytes;
      return true;
    };
    std::int64_t sizes[4];
    if (!read(sizes, 4) || sizes[0] != n() || sizes[1] != k()) return false;
    const std::int64_t most = end - at;  // each takes more than a byte
    if (sizes[2] < 0 || sizes[2] > most || sizes[3] < 0 || sizes[3] > blocks()) return false;
    if (sizes[3] > most / (pairs() * kRow)) return false;
    outliers_.resize(sizes[2]);
    packed_blocks_.resize(sizes[3]);
    packed_.resize(sizes[3] * pairs() * kRow);
    return read(codebook_.data(), kCodebook) && read(first_.data(), blocks() + 1) &&
           read(outliers_.data(), sizes[2]) && read(packed_blocks_.data(), sizes[3]) &&
           read(packed_.data(), static_cast<std::int64_t>(packed_.size())) && at == end &&
           is_in_order() && sort_by_row();
  }

  bool is_in_order() const {
    if (first_[0] != 0 || outliers_count() != static_cast<std::int64_t>(outliers_.size()) ||
        !std::is_sorted(first_.begin(), first_.end())) {
      return false;
    }
    for (const Outlier& one : outliers_) {
      if (one.output >= kBlock || one.k >= static_cast<std::uint32_t>(k())) return false;
    }
    const auto is_none = [](std::int64_t left, std::int64_t right) { return left >= right; };
    return std::adjacent_find(packed_blocks_.begin(), packed_blocks_.end(), is_none) ==
               packed_blocks_.end() &&
           (packed_blocks_.empty() ||
            (packed_blocks_.front() >= 0 && packed_blocks_.back() < blocks()));
  }

  bool sort_by_row() {
    by_row_ = outliers_;
    for (std::int64_t block = 0; block < blocks(); ++block) {
      std::sort(by_row_.begin() + first_[block], by_row_.begin() + first_[block + 1],
                [](const Outlier& left, const Outlier& right) {
                  return std::make_tuple(left.k / 2, left.output, left.k % 2) <
                         std::make_tuple(right.k / 2, right.output, right.k % 2);
                });
    }
    return true;
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
      .def_static(
          "chosen",
          [](std::uintptr_t packed, std::int64_t n, std::int64_t k) {
            check_shape(n, k);
            py::gil_scoped_release release;
            return Compact::chosen(reinterpret_cast<const std::uint16_t*>(packed), n, k, true);
          },
          py::arg("packed"), py::arg("n"), py::arg("k"),
          "Choose how to write packed rows, by address, on this thread alone; `write` does so.\n"
          "None and ValueError as of `made`.")
      .def(
          "write",
          [](Compact& compact, std::uintptr_t packed, std::uintptr_t rows) {
            py::gil_scoped_release release;
            compact.write(reinterpret_cast<const std::uint16_t*>(packed),
                          reinterpret_cast<std::uint8_t*>(rows), true);
          },
          py::arg("packed"), py::arg("rows"), "Write, once, what was chosen; both by address.")
      .def(
          "kept",
          [](const Compact& compact) {
            const std::vector<std::uint8_t> bytes = compact.kept();
            return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
          },
          "All of it beside the rows, as `restored` takes it on this kind of machine.")
      .def_static(
          "restored",
          [](std::int64_t n, std::int64_t k, const py::bytes& kept) {
            check_shape(n, k);
            const std::string_view bytes = kept;
            auto found = Compact::restored(
                n, k, reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
            if (found == nullptr) throw py::value_error("expected what `kept` has given");
            return found;
          },
          py::arg("n"), py::arg("k"), py::arg("kept"),
          "What `kept` has given.  Raises ValueError: it is damaged, or of another shape.")
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

// What formats have in common whose weights are short codes with scales.
//
// A weight is code · scale or (code - zero) · scale: the code's value widened to float32, multiplied
// in float32, rounded to the nearest bf16.  GPUs and products of many tokens have it so; those of few
// tokens are of the codes, and their sums are scaled (codes.h).  Neighbouring k of an output, a group,
// share a scale and a zero point.  A block's rows come first, then its scales, group after group, then
// the zero points, a byte each; whatever lies on a GPU or on its way there is whole blocks.

#ifndef RAY_HETERO_FORMATS_SCALED_H
#define RAY_HETERO_FORMATS_SCALED_H

#include "encoding.h"

#include <cstdint>

namespace ray_hetero {

enum class ScaleType {
  kFloat,     // float32, one an output
  kOneFloat,  // float32, one for all outputs of a block
  kBf16,      // one an output
  kE8m0,      // exponents as OCP MX has them, one an output
  kE4m3,      // times a factor that all share, one an output
};

constexpr std::int64_t scale_bytes(ScaleType type) {
  switch (type) {
    case ScaleType::kFloat: return kBlock * 4;
    case ScaleType::kOneFloat: return 4;
    case ScaleType::kBf16: return kBlock * 2;
    case ScaleType::kE8m0:
    case ScaleType::kE4m3: return kBlock;
  }
  return 0;
}

class Scaled : public Encoding {
 public:
  static constexpr std::int64_t kStep = 4;  // k that are expanded together; groups are multiples

  // Kernels have codes as bf16: the value less `zero`, divided by `unit`.
  Scaled(Format format, std::int64_t n, std::int64_t k, std::int64_t pair_bytes,
         std::int64_t group, ScaleType type, bool has_zeros, float zero, float unit,
         float factor = 1)
      : Encoding(n, k), format_(format), pair_bytes_(pair_bytes), group_(group), type_(type),
        has_zeros_(has_zeros), zero_(zero), unit_(unit), factor_(factor) {}

  BlockRows block(const std::uint8_t* data, std::int64_t block) const override {
    return {format_, pair_bytes_, data + block * block_bytes()};
  }
  // Whole cache lines, so that the next block begins with one.
  std::int64_t block_bytes() const {
    constexpr std::int64_t kLine = 64;
    const std::int64_t tail = groups() * (scale_bytes(type_) + (has_zeros_ ? kBlock : 0));
    return pairs() / 2 * pair_bytes_ + (tail + kLine - 1) / kLine * kLine;
  }
  std::int64_t group() const { return group_; }
  std::int64_t groups() const { return (k() + group_ - 1) / group_; }
  ScaleType type() const { return type_; }
  bool has_zeros() const { return has_zeros_; }
  float zero() const { return zero_; }
  float unit() const { return unit_; }
  float factor() const { return factor_; }
  // Of a block's first zero point behind its first scale.
  std::int64_t zeros_offset() const { return groups() * scale_bytes(type_); }

 private:
  Format format_;
  std::int64_t pair_bytes_, group_;
  ScaleType type_;
  bool has_zeros_;
  float zero_, unit_, factor_;
};

}  // namespace ray_hetero

#endif

#if defined(RAY_HETERO_LEVEL) && !defined(RAY_HETERO_FORMATS_SCALED_ROWS)
#define RAY_HETERO_FORMATS_SCALED_ROWS

#include "../sums.h"
#include "../this_level.h"

namespace ray_hetero::RAY_HETERO_LEVEL {

// The scales of a group, for each of a block's outputs, and what their codes have too much.
struct GroupScales {
  Floats left, right;            // times the unit of codes
  Floats zero_left, zero_right;  // in units of codes; 0 where no zero points are stored

  // Those of a group, whose scales are of that type.
  template <ScaleType kType>
  RAY_HETERO_INLINE static GroupScales read(const Scaled& encoding, const std::uint8_t* tail,
                                            std::int64_t group) {
    GroupScales found = stored<kType>(encoding, tail + group * scale_bytes(kType));
    const Floats unit = spread(encoding.unit());
    found.left = times(found.left, unit);
    found.right = times(found.right, unit);
    if (encoding.has_zeros()) {
      const std::uint8_t* zero = tail + encoding.zeros_offset() + group * kBlock;
      const Floats own = spread(kLargeCodes + encoding.zero());
      found.zero_left = minus(load_large_codes(zero), own);
      found.zero_right = minus(load_large_codes(zero + kLanes), own);
    }
    return found;
  }

 private:
  template <ScaleType kType>
  RAY_HETERO_INLINE static GroupScales stored(const Scaled& encoding, const std::uint8_t* at) {
    if constexpr (kType == ScaleType::kFloat) {
      const auto* floats = reinterpret_cast<const float*>(at);
      return {load_floats(floats), load_floats(floats + kLanes), zeros(), zeros()};
    } else if constexpr (kType == ScaleType::kOneFloat) {
      float one;
      std::memcpy(&one, at, sizeof(one));
      return {spread(one), spread(one), zeros(), zeros()};
    } else if constexpr (kType == ScaleType::kBf16) {
      const auto* short_ones = reinterpret_cast<const std::uint16_t*>(at);
      return {load_bf16(short_ones), load_bf16(short_ones + kLanes), zeros(), zeros()};
    } else if constexpr (kType == ScaleType::kE8m0) {
      return {load_exponents(at), load_exponents(at + kLanes), zeros(), zeros()};
    } else {
      const Floats factor = spread(encoding.factor());
      return {times(load_e4m3(at), factor), times(load_e4m3(at + kLanes), factor), zeros(), zeros()};
    }
  }
};

// Where the groups of a stretch's rows are.
class Groups {
 public:
  explicit Groups(const Stretch& stretch)
      : encoding_(static_cast<const Scaled&>(stretch.encoding)), tail_(stretch.tail()),
        first_(stretch.first), count_(stretch.rows), rows_(encoding_.group() / 2) {}

  const Scaled& encoding() const { return encoding_; }
  // Behind the stretch's last group.
  std::int64_t last() const { return at(count_ - 1) + 1; }
  // Of a row of the stretch.
  std::int64_t at(std::int64_t row) const { return (first_ + row) / rows_; }
  // The stretch's first row behind a group.
  std::int64_t end(std::int64_t group) const { return (group + 1) * rows_ - first_; }
  // Have the scales and zero points of the stretch come, and those of as many groups behind it or of
  // the next block: they lie apart from the rows, where nothing else asks for them in time.
  RAY_HETERO_PREFETCH void prefetch() const {
    prefetch(0, scale_bytes(encoding_.type()));
    if (encoding_.has_zeros()) prefetch(encoding_.zeros_offset(), kBlock);
  }
  // Whether tiles have rows of one group only.
  bool are_tiles() const { return rows_ % kTile == 0; }
  // Whether some rows of the stretch are all those of a group.
  bool is_whole(std::int64_t group, std::int64_t begin, std::int64_t end) const {
    return begin == group * rows_ - first_ && end == begin + rows_;
  }
  // Call use(group, scales) for some groups.  Never inlined: its many cases would only push out its
  // caller's registers.
  template <typename Use>
  __attribute__((noinline)) void scales(std::int64_t first, std::int64_t last, Use use) const {
    switch (encoding_.type()) {
      case ScaleType::kFloat: return scales_of<ScaleType::kFloat>(first, last, use);
      case ScaleType::kOneFloat: return scales_of<ScaleType::kOneFloat>(first, last, use);
      case ScaleType::kBf16: return scales_of<ScaleType::kBf16>(first, last, use);
      case ScaleType::kE8m0: return scales_of<ScaleType::kE8m0>(first, last, use);
      case ScaleType::kE4m3: return scales_of<ScaleType::kE4m3>(first, last, use);
    }
  }

 private:
  // Some bytes of each group, from an offset on.
  RAY_HETERO_PREFETCH void prefetch(std::int64_t offset, std::int64_t bytes) const {
    const std::int64_t group = at(0), count = last() - group;
    const bool is_last = 2 * (first_ + count_) >= encoding_.k();
    const std::uint8_t* own = tail_ + offset + group * bytes;
    const std::uint8_t* next =
        is_last ? tail_ + offset + encoding_.block_bytes() : own + count * bytes;
    for (std::int64_t line = 0; line < count * bytes; line += kLineBytes) {
      prefetch_l1(own + line);
      prefetch_l2(next + line);
    }
  }

  template <ScaleType kType, typename Use>
  void scales_of(std::int64_t first, std::int64_t last, Use use) const {
    for (std::int64_t group = first; group < last; ++group) {
      use(group, GroupScales::read<kType>(encoding_, tail_, group));
    }
  }

  const Scaled& encoding_;
  const std::uint8_t* tail_;
  const std::int64_t first_, count_;  // row of the stretch, and how many it has
  const std::int64_t rows_;           // of a group
};

// Scales and zero points of a stretch's groups as floats, made of some groups at once.
class ScalesAhead {
 public:
  explicit ScalesAhead(const Stretch& stretch) : groups_(stretch), room_(reserve()) {
    groups_.prefetch();
  }
  ScalesAhead(const ScalesAhead&) = delete;  // a thread has memory for those of one stretch
  ScalesAhead& operator=(const ScalesAhead&) = delete;

  // A thread's memory for them.
  static float* reserve() { return scratch(kGroups * kGroupFloats, kScales); }

  const Groups& groups() const { return groups_; }
  // Has to be called for a group before its scales are asked for.
  RAY_HETERO_INLINE void prepare(std::int64_t group) {
    if (__builtin_expect(group < begin_ || group >= end_, 0)) read(group);
  }
  RAY_HETERO_INLINE GroupScales at(std::int64_t group) const {
    const float* from = of(group);
    return {load_floats(from), load_floats(from + kLanes), load_floats(from + 2 * kLanes),
            load_floats(from + 3 * kLanes)};
  }

 private:
  static constexpr std::int64_t kGroups = 64;  // that are made at once
  static constexpr std::int64_t kGroupFloats = 4 * kLanes;

  float* of(std::int64_t group) const { return room_ + (group - begin_) * kGroupFloats; }
  void read(std::int64_t group) {
    begin_ = group;
    end_ = std::min(group + kGroups, groups_.last());
    groups_.scales(begin_, end_, [this](std::int64_t one, const GroupScales& scales) {
      float* to = of(one);
      store_floats(to, scales.left);
      store_floats(to + kLanes, scales.right);
      store_floats(to + 2 * kLanes, scales.zero_left);
      store_floats(to + 3 * kLanes, scales.zero_right);
    });
  }

  const Groups groups_;
  float* const room_;
  std::int64_t begin_ = 0, end_ = 0;
};

// Reads rows of a format's codes, two at a time: not scaled, exact in bf16.
//
// Read()(at) gives the two that lie at `at`, kBytes of them; Read::kTable are the values of codes of
// four bits that lie as int4.h says, or nullptr.
template <typename Read, std::int64_t kBytes>
class CodeRows {
 public:
  static constexpr std::int64_t kPairBytes = kBytes;
  static constexpr const std::uint16_t* kTable = Read::kTable;

  RAY_HETERO_INLINE explicit CodeRows(const Stretch& stretch) : at_(stretch.data) {}

  RAY_HETERO_INLINE const std::uint8_t* at() const { return at_; }

  RAY_HETERO_INLINE TwoRows next() {
    const std::uint8_t* rows = at_;
    at_ += kPairBytes;
    return read_(rows);
  }

 private:
  const std::uint8_t* at_;
  const Read read_{};
};

// The same rows scaled and rounded to bf16; kMayHaveZeros is whether the format has zero points.
template <typename Of, bool kMayHaveZeros = false>
class ScaledRows {
 public:
  using Codes = Of;
  static constexpr std::int64_t kPairBytes = Of::kPairBytes;
  static constexpr bool kIsExpanded = false, kHasCodes = true;

  RAY_HETERO_INLINE explicit ScaledRows(const Stretch& stretch)
      : codes_(stretch), groups_(stretch), group_(groups_.at(0)), left_(groups_.end(group_)),
        scales_(scales(group_)) {}

  RAY_HETERO_INLINE const std::uint8_t* at() const { return codes_.at(); }

  RAY_HETERO_INLINE TwoRows next() {
    if (left_ == 0) {
      left_ = groups_.encoding().group() / 2;
      scales_ = scales(++group_);
    }
    left_ -= 2;
    TwoRows rows = codes_.next();
    for (int row = 0; row < 2; ++row) {
      rows.left[row] = scaled(rows.left[row], scales_.left, scales_.zero_left);
      rows.right[row] = scaled(rows.right[row], scales_.right, scales_.zero_right);
    }
    return rows;
  }

 private:
  GroupScales scales(std::int64_t group) const {
    GroupScales found;
    groups_.scales(group, group + 1,
                   [&](std::int64_t, const GroupScales& scales) { found = scales; });
    return found;
  }
  static RAY_HETERO_INLINE Pairs scaled(Pairs codes, Floats scale, Floats zero) {
    if constexpr (!kMayHaveZeros) {
      return rounded_pairs(times(firsts(codes), scale), times(seconds(codes), scale));
    }
    return rounded_pairs(times(minus(firsts(codes), zero), scale),
                         times(minus(seconds(codes), zero), scale));
  }

  Of codes_;
  const Groups groups_;
  std::int64_t group_, left_;  // rows of the group
  GroupScales scales_;
};

// Reads two rows of codes of four bits, which lie as int4.h says, by a table of their values.
template <const std::uint16_t* kValues>
class ReadNibbles {
 public:
  static constexpr const std::uint16_t* kTable = kValues;

  RAY_HETERO_INLINE ReadNibbles() : values_(word_table(kValues)) {}

  RAY_HETERO_INLINE TwoRows operator()(const std::uint8_t* at) const {
    const Pairs words = load_pairs(at);
    return {{looked_up_words<0>(values_, words), looked_up_words<8>(values_, words)},
            {looked_up_words<4>(values_, words), looked_up_words<12>(values_, words)}};
  }

 private:
  const WordTable values_;
};

}  // namespace ray_hetero::RAY_HETERO_LEVEL

#endif

#ifdef RAY_HETERO_PYTHON

namespace ray_hetero {

inline ScaleType scale_type(const std::string& name) {
  constexpr std::pair<const char*, ScaleType> kTypes[] = {
      {"float32", ScaleType::kFloat}, {"one", ScaleType::kOneFloat},
      {"bfloat16", ScaleType::kBf16}, {"e8m0", ScaleType::kE8m0}, {"e4m3", ScaleType::kE4m3}};
  for (const auto& [known, type] : kTypes) {
    if (name == known) return type;
  }
  throw pybind11::value_error("expected float32, one, bfloat16, e8m0 or e4m3 scales, got " + name);
}

template <typename Made, typename... More>
Made made_scaled(std::int64_t n, std::int64_t k, std::int64_t group, const std::string& scales,
                 More... more) {
  check_shape(n, k);
  if (group <= 0 || group % Scaled::kStep != 0) {
    throw pybind11::value_error("expected groups in multiples of 4, got " +
                                std::to_string(group));
  }
  return {n, k, group, scale_type(scales), more...};
}

// The face of a format that is made of codes and scales; `more` names what it has beside these.
template <typename Made, typename... More, typename... Names>
void bind_scaled(pybind11::module_& module, const char* name, const char* says, Names... more) {
  namespace py = pybind11;
  py::class_<Made, Encoding>(module, name, says)
      .def(py::init(&made_scaled<Made, More...>), py::kw_only(), py::arg("n"), py::arg("k"),
           py::arg("group"), py::arg("scales"), more...,
           "`group` is neighbouring k of one scale, `scales` their type: float32, one (float32 for\n"
           "all 32 outputs of a block), bfloat16, e8m0, or e4m3 times `factor`.\n"
           "Raises ValueError: shapes that the layout cannot hold, an unknown type.")
      .def_property_readonly("block_bytes", &Made::block_bytes,
                             "Bytes of 32 outputs: their rows, scales and zero points.");
}

}  // namespace ray_hetero

#endif

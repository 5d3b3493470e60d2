// What formats have in common whose weights are short codes with scales.
//
// A weight is code · scale or (code - zero) · scale: the code's value widened to float32, multiplied
// in float32, rounded to the nearest bf16.  Neighbouring k of an output, a group, share a scale and
// a zero point.  A block's rows come first, then its scales, group after group, then the zero points,
// a byte each; whatever lies on a GPU or on its way there is whole blocks.

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

  Scaled(Format format, std::int64_t n, std::int64_t k, std::int64_t pair_bytes,
         std::int64_t group, ScaleType type, bool has_zeros, float factor = 1)
      : Encoding(n, k), format_(format), pair_bytes_(pair_bytes), group_(group), type_(type),
        has_zeros_(has_zeros), factor_(factor) {}

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
  float factor() const { return factor_; }
  // Of a block's first zero point behind its first scale.
  std::int64_t zeros_offset() const { return groups() * scale_bytes(type_); }

 private:
  Format format_;
  std::int64_t pair_bytes_, group_;
  ScaleType type_;
  bool has_zeros_;
  float factor_;
};

}  // namespace ray_hetero

#endif

#ifdef RAY_HETERO_LEVEL

namespace ray_hetero::RAY_HETERO_LEVEL {

// What belongs to elements of a row: a quarter of a block's outputs, each in two lanes.
struct Quarters {
  Floats of[4];

  RAY_HETERO_INLINE void set(Floats left, Floats right) {
    of[0] = doubled_first(left);
    of[1] = doubled_second(left);
    of[2] = doubled_first(right);
    of[3] = doubled_second(right);
  }
  RAY_HETERO_INLINE void set(Floats all) {
    for (Floats& quarter : of) quarter = all;
  }
};

// The scales of the k that come next.
//
// The format's kFactor is multiplied with each; its kZero is the zero point where none is stored.
template <typename Of>
class Scales {
 public:
  Quarters scales, zeros;  // zeros as large_codes() has them

  RAY_HETERO_INLINE explicit Scales(const Stretch& stretch)
      : encoding_(static_cast<const Scaled&>(stretch.encoding)), tail_(stretch.tail()),
        group_(2 * stretch.first / encoding_.group()),
        left_(encoding_.group() - 2 * stretch.first % encoding_.group()) {
    zeros.set(spread(kLargeCodes + Of::kZero));
    load();
  }

  // Before the next kStep k.
  RAY_HETERO_INLINE void advance() {
    if (left_ == 0) {
      ++group_;
      left_ = encoding_.group();
      load();
    }
    left_ -= Scaled::kStep;
  }

 private:
  RAY_HETERO_INLINE void load() {
    const std::uint8_t* at = tail_ + group_ * scale_bytes(encoding_.type());
    switch (encoding_.type()) {
      case ScaleType::kFloat: {
        const auto* floats = reinterpret_cast<const float*>(at);
        scales.set(scaled(load_floats(floats)), scaled(load_floats(floats + kLanes)));
        break;
      }
      case ScaleType::kOneFloat: {
        float one;
        std::memcpy(&one, at, sizeof(one));
        scales.set(scaled(spread(one)));
        break;
      }
      case ScaleType::kBf16: {
        const auto* short_ones = reinterpret_cast<const std::uint16_t*>(at);
        scales.set(scaled(load_bf16(short_ones)), scaled(load_bf16(short_ones + kLanes)));
        break;
      }
      case ScaleType::kE8m0:
        scales.set(scaled(load_exponents(at)), scaled(load_exponents(at + kLanes)));
        break;
      case ScaleType::kE4m3: {
        const Floats factor = spread(encoding_.factor());
        scales.set(times(load_e4m3(at), factor), times(load_e4m3(at + kLanes), factor));
        break;
      }
    }
    if (encoding_.has_zeros()) {
      const std::uint8_t* zero = tail_ + encoding_.zeros_offset() + group_ * kBlock;
      zeros.set(load_large_codes(zero), load_large_codes(zero + kLanes));
    }
  }

  static RAY_HETERO_INLINE Floats scaled(Floats scale) {
    if constexpr (Of::kFactor == 1.0f) return scale;
    return times(scale, spread(Of::kFactor));
  }

  const Scaled& encoding_;
  const std::uint8_t* tail_;
  std::int64_t group_, left_;
};

// What readers of a format's rows have in common: where the next two are, and what scales them.
template <typename Of, std::int64_t kBytes>
class ScaledRows {
 public:
  static constexpr std::int64_t kPairBytes = kBytes;
  static constexpr bool kIsExpanded = false, kIsCostly = true;

  RAY_HETERO_INLINE explicit ScaledRows(const Stretch& stretch)
      : at_(stretch.data), scales_(stretch) {}

  RAY_HETERO_INLINE const std::uint8_t* at() const { return at_; }

 protected:
  // The next two rows, whose scales are there from now on.
  RAY_HETERO_INLINE const std::uint8_t* advance() {
    scales_.advance();
    const std::uint8_t* rows = at_;
    at_ += kPairBytes;
    return rows;
  }
  template <int kQuarter>
  RAY_HETERO_INLINE Floats scaled(Floats value) const {
    return times(value, scales_.scales.of[kQuarter]);
  }
  // Of a code as large_codes() has it.
  template <int kQuarter>
  RAY_HETERO_INLINE Floats scaled_code(Floats code) const {
    return scaled<kQuarter>(minus(code, scales_.zeros.of[kQuarter]));
  }

 private:
  const std::uint8_t* at_;
  Scales<Of> scales_;
};

// Reads rows of codes of four bits, which lie as int4.h says.
//
// Own, which is derived of it, has value<kShift, kQuarter>(codes): the weights of a quarter whose
// codes are kShift bits up in their lanes.
template <typename Own, typename Of>
class NibbleRows : public ScaledRows<Of, kRow> {
 public:
  RAY_HETERO_INLINE explicit NibbleRows(const Stretch& stretch) : ScaledRows<Of, kRow>(stretch) {}

  RAY_HETERO_INLINE TwoRows next() {
    const Pairs codes = load_pairs(this->advance());
    TwoRows rows;
    rows.left[0] = pairs<0, 0>(codes);
    rows.right[0] = pairs<0, 2>(codes);
    rows.left[1] = pairs<1, 0>(codes);
    rows.right[1] = pairs<1, 2>(codes);
    return rows;
  }

 private:
  template <int kWhich, int kQuarter>
  RAY_HETERO_INLINE Pairs pairs(Pairs codes) const {
    constexpr int kShift = 16 * kWhich + 4 * kQuarter;
    const Own& own = static_cast<const Own&>(*this);
    return rounded_pairs(own.template value<kShift, kQuarter>(codes),
                         own.template value<kShift + 4, kQuarter + 1>(codes));
  }
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

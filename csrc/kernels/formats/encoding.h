// How a weight lies in memory, apart from its rows.

#pragma once

#include "rows.h"

#include <cstdint>

namespace ray_hetero {

// Each format NAME has a file here with a class NAME, which is an Encoding, for each level a class
// NAMERows, which reads rows of a block, and its face in Python.  A new one is added to this list
// and to all.h.
#define RAY_HETERO_FORMATS(FORMAT) \
  FORMAT(Packed) FORMAT(Compact) FORMAT(Int4) FORMAT(Int8) FORMAT(Fp8) FORMAT(Fp4)

#define RAY_HETERO_FORMAT(name) k##name,
enum class Format { RAY_HETERO_FORMATS(RAY_HETERO_FORMAT) };
#undef RAY_HETERO_FORMAT

// One weight of a block that its rows do not hold.
struct Outlier {
  std::uint32_t k;
  std::uint16_t output;  // of the block
  std::uint16_t value;   // bf16
};

struct Outliers {
  const Outlier *first = nullptr, *last = nullptr;

  const Outlier* begin() const { return first; }
  const Outlier* end() const { return last; }
  std::int64_t size() const { return last - first; }
};

// Where the rows of a block are, and how.
struct BlockRows {
  Format format;
  std::int64_t pair_bytes;  // of two rows
  const std::uint8_t* data;
};

// What belongs to a weight [n, k] beside its rows.
class Encoding {
 public:
  Encoding(std::int64_t n, std::int64_t k) : n_(n), k_(k) {}
  virtual ~Encoding() = default;

  std::int64_t n() const { return n_; }
  std::int64_t k() const { return k_; }
  std::int64_t blocks() const { return n_ / kBlock; }
  std::int64_t pairs() const { return k_ / 2; }
  // A block of a weight whose memory begins at `data`; blocks may be of several formats.
  virtual BlockRows block(const std::uint8_t* data, std::int64_t block) const = 0;
  // Weights of a block that its rows do not hold, by output and k; these have 0 in their places.
  virtual Outliers outliers(std::int64_t) const { return {}; }
  // Those of `rows` rows of a block from `row` on.
  virtual Outliers outliers_of_rows(std::int64_t, std::int64_t, std::int64_t) const { return {}; }

 private:
  std::int64_t n_, k_;
};

// Neighbouring rows of a block, an even number of them from an even one on.
struct Stretch {
  const Encoding& encoding;
  Format format;
  std::int64_t pair_bytes;  // of two rows
  std::int64_t block, first, rows;
  const std::uint8_t* data;  // of the first one

  // What is kept behind the rows of the block.
  const std::uint8_t* tail() const {
    return data + (encoding.pairs() - first) / 2 * pair_bytes;
  }
};

}  // namespace ray_hetero

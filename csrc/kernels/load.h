// Weights read from a checkpoint's files, some rows at a time, straight into the order of the kernels.
//
// What is read lies between the system and the weight in a buffer that fits a core's cache, so that
// memory sees each byte once in each direction.  Threads that call this share nothing.

#pragma once

#include "arrange.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <system_error>
#include <vector>

namespace ray_hetero {

// Bytes of stored rows that are read and brought into order together; half of a small core's cache.
constexpr std::int64_t kReadBytes = 512 << 10;

// A file ends before the rows that its header tells of.
struct FileTooShort {};

// Rows of a matrix in a file.
struct StoredRows {
  int file;
  std::int64_t offset;  // of the first row, in bytes
  std::int64_t stride;  // bytes from a row to the next
  std::int64_t rows;
};

inline void read_fully(int file, std::int64_t offset, std::int64_t bytes, std::uint8_t* to) {
  while (bytes > 0) {
    const ssize_t got = pread(file, to, static_cast<std::size_t>(bytes), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw std::system_error(errno, std::generic_category());
    if (got == 0) throw FileTooShort{};
    offset += got;
    bytes -= got;
    to += got;
  }
}

// A matrix whose rows lie in one place or in several, one behind the other.
struct StoredMatrix {
  std::vector<StoredRows> parts;
  std::int64_t row_bytes;
  std::int64_t outputs_per_row = 1;  // scales of a block belong to several outputs

  std::int64_t outputs() const {
    std::int64_t all = 0;
    for (const StoredRows& part : parts) all += part.rows * outputs_per_row;
    return all;
  }
};

// The least and the last row of a part that some outputs have there.
struct RowRange {
  std::int64_t first, last;

  bool is_empty() const { return last < first; }
  std::int64_t bytes(const StoredRows& part, std::int64_t row_bytes) const {
    return is_empty() ? 0 : (last - first) * part.stride + row_bytes;
  }
};

inline RowRange range_in(const StoredMatrix& matrix, std::size_t part, const std::int64_t* outputs,
                         std::int64_t count) {
  std::int64_t begin = 0;
  for (std::size_t before = 0; before < part; ++before) {
    begin += matrix.parts[before].rows * matrix.outputs_per_row;
  }
  const std::int64_t end = begin + matrix.parts[part].rows * matrix.outputs_per_row;
  std::int64_t least = end, most = begin - 1;
  for (std::int64_t one = 0; one < count; ++one) {
    if (outputs[one] < begin || outputs[one] >= end) continue;
    least = std::min(least, outputs[one]);
    most = std::max(most, outputs[one]);
  }
  if (most < least) return {0, -1};
  return {(least - begin) / matrix.outputs_per_row, (most - begin) / matrix.outputs_per_row};
}

// Ask the system to read what these outputs will need, without waiting for it.
inline void announce(const StoredMatrix& matrix, const std::int64_t* outputs, std::int64_t count) {
  for (std::size_t part = 0; part < matrix.parts.size(); ++part) {
    const StoredRows& rows = matrix.parts[part];
    const RowRange range = range_in(matrix, part, outputs, count);
    if (range.is_empty()) continue;
    // A system that cannot do so reads when it is asked to.
    posix_fadvise(rows.file, rows.offset + range.first * rows.stride,
                  range.bytes(rows, matrix.row_bytes), POSIX_FADV_WILLNEED);
  }
}

// Read rows into a buffer, and say for each output where its row is.
inline void read_rows(const StoredMatrix& matrix, const std::int64_t* outputs, std::int64_t count,
                      std::vector<std::uint8_t>& buffer, const std::uint8_t** rows) {
  std::vector<RowRange> ranges;
  std::int64_t bytes = 0;
  for (std::size_t part = 0; part < matrix.parts.size(); ++part) {
    ranges.push_back(range_in(matrix, part, outputs, count));
    bytes += ranges.back().bytes(matrix.parts[part], matrix.row_bytes);
  }
  if (static_cast<std::int64_t>(buffer.size()) < bytes) buffer.resize(bytes);
  std::uint8_t* at = buffer.data();
  std::int64_t begin = 0;
  for (std::size_t part = 0; part < matrix.parts.size(); ++part) {
    const StoredRows& stored = matrix.parts[part];
    const RowRange range = ranges[part];
    const std::int64_t end = begin + stored.rows * matrix.outputs_per_row;
    if (!range.is_empty()) {
      const std::int64_t length = range.bytes(stored, matrix.row_bytes);
      read_fully(stored.file, stored.offset + range.first * stored.stride, length, at);
      for (std::int64_t one = 0; one < count; ++one) {
        if (outputs[one] < begin || outputs[one] >= end) continue;
        const std::int64_t row = (outputs[one] - begin) / matrix.outputs_per_row;
        rows[one] = at + (row - range.first) * stored.stride;
      }
      at += length;
    }
    begin = end;
  }
}

// How scales are stored.
enum class StoredScale { kNone, kE8m0, kE4m3, kBf16, kFloat };

constexpr std::int64_t stored_scale_bytes(StoredScale type) {
  return type == StoredScale::kFloat ? 4 : type == StoredScale::kBf16 ? 2 : 1;
}

// Scales of a row that no weight can have: infinite, NaN or above `largest`.
inline std::int64_t wrong_scales(StoredScale type, const std::uint8_t* row, std::int64_t groups,
                                 float largest) {
  std::int64_t wrong = 0;
  const int largest_exponent = 127 + std::ilogb(largest);  // 127 stands for 1, 255 for NaN
  for (std::int64_t group = 0; group < groups; ++group) {
    if (type == StoredScale::kE8m0) {
      wrong += row[group] > largest_exponent;
    } else if (type == StoredScale::kE4m3) {
      wrong += (row[group] & 0x7f) == 0x7f;
    } else {
      std::uint32_t bits = 0;
      if (type == StoredScale::kBf16) {
        std::memcpy(reinterpret_cast<std::uint8_t*>(&bits) + 2, row + 2 * group, 2);
      } else {
        std::memcpy(&bits, row + 4 * group, 4);
      }
      float value;
      std::memcpy(&value, &bits, 4);
      wrong += !(std::fabs(value) <= largest);
    }
  }
  return wrong;
}

// Bytes of a row that have all bits of a code that is no number.
inline std::int64_t bytes_like(std::uint8_t code, const std::uint8_t* row, std::int64_t bytes) {
  constexpr std::int64_t kSome = 128;  // so many are counted in a byte
  std::int64_t all = 0;
  for (std::int64_t at = 0; at < bytes; at += kSome) {
    const std::int64_t end = std::min(at + kSome, bytes);
    std::uint8_t some = 0;
    for (std::int64_t i = at; i < end; ++i) some += (row[i] & code) == code;
    all += some;
  }
  return all;
}

// What `load` reads.
struct Loaded {
  StoredMatrix codes;
  StoredMatrix scales;  // without parts where there are none
  StoredScale scale;
  bool is_widened;  // bf16 scales are written as float32
  float largest_scale;
  std::uint8_t no_number;  // code of eight bits, apart from its sign; 0 if all are numbers
  ArrangedSizes sizes;
};

// How much of what was read no weight can have.
struct Wrong {
  std::int64_t scales = 0, codes = 0;
};

// Read the rows of `outputs`, by their numbers in the files, and write their blocks.
inline Wrong load(const Loaded& stored, const std::int64_t* outputs, std::int64_t count,
                         std::uint8_t* to) {
  thread_local std::vector<std::uint8_t> codes, scales, widened;
  if (count == 0) return {};  // there may be no rows that have a size
  const ArrangedSizes& sizes = stored.sizes;
  const std::int64_t groups = sizes.groups;
  announce(stored.codes, outputs, count);
  announce(stored.scales, outputs, count);
  std::int64_t stride = 0;
  Wrong wrong;
  for (const StoredRows& part : stored.codes.parts) stride = std::max(stride, part.stride);
  const std::int64_t at_once =
      std::max<std::int64_t>(1, kReadBytes / (kArranged * stride)) * kArranged;
  std::vector<const std::uint8_t*> code_rows(at_once), scale_rows(at_once);
  for (std::int64_t first = 0; first < count; first += at_once) {
    const std::int64_t some = std::min(at_once, count - first);
    read_rows(stored.codes, outputs + first, some, codes, code_rows.data());
    if (groups > 0) {
      read_rows(stored.scales, outputs + first, some, scales, scale_rows.data());
      for (std::int64_t one = 0; one < some; ++one) {
        wrong.scales += wrong_scales(stored.scale, scale_rows[one], groups, stored.largest_scale);
      }
    }
    for (std::int64_t one = 0; stored.no_number != 0 && one < some; ++one) {
      wrong.codes += bytes_like(stored.no_number, code_rows[one], sizes.row_bytes());
    }
    if (groups > 0 && stored.is_widened) {
      widened.assign(some * groups * 4, 0);
      for (std::int64_t one = 0; one < some; ++one) {
        std::uint8_t* row = widened.data() + one * groups * 4;
        for (std::int64_t group = 0; group < groups; ++group) {
          std::memcpy(row + 4 * group + 2, scale_rows[one] + 2 * group, 2);
        }
        scale_rows[one] = row;
      }
    }
    for (std::int64_t block = 0; block < some; block += kArranged) {
      BlockRowsStored rows;
      std::copy_n(code_rows.data() + block, kArranged, rows.codes);
      std::copy_n(scale_rows.data() + block, kArranged, rows.scales);
      arrange_block(rows, sizes, to + (first + block) / kArranged * sizes.block_bytes);
    }
  }
  return wrong;
}

}  // namespace ray_hetero

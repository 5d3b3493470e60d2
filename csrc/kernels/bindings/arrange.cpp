// A checkpoint's codes brought into the order of the kernels, from memory or from files.

#include "../arrange.h"

#include "../load.h"
#include "arguments.h"

namespace ray_hetero {
namespace {

void check(const ArrangedSizes& sizes, std::int64_t outputs, bool has_scales) {
  if (outputs % kArranged != 0 || sizes.inputs <= 0 || sizes.inputs % 32 != 0) {
    throw py::value_error("expected outputs and inputs in multiples of 32, got " +
                          std::to_string(outputs) + " and " + std::to_string(sizes.inputs));
  }
  if ((sizes.bits != 4 && sizes.bits != 8 && (sizes.bits != 16 || has_scales)) ||
      (sizes.scale_bytes != 1 && sizes.scale_bytes != 2 && sizes.scale_bytes != 4)) {
    throw py::value_error("expected codes of 4 or 8 bits and scales of 1, 2 or 4 bytes, got " +
                          std::to_string(sizes.bits) + " and " +
                          std::to_string(sizes.scale_bytes));
  }
  if (sizes.groups < 0 || sizes.block_bytes < sizes.used()) {
    throw py::value_error("blocks of " + std::to_string(sizes.block_bytes) +
                          " bytes are too small");
  }
}

void check_outputs(const std::vector<std::int64_t>& outputs, std::int64_t stored) {
  for (const std::int64_t output : outputs) {
    if (output < 0 || output >= stored) {
      throw py::value_error("expected outputs below " + std::to_string(stored) + ", got " +
                            std::to_string(output));
    }
  }
}

void arrange_codes(std::uintptr_t codes, std::int64_t code_stride, std::uintptr_t scales,
                   std::int64_t scale_stride, std::int64_t inputs, std::int64_t groups,
                   std::int64_t scale_bytes, int bits, const std::vector<std::int64_t>& outputs,
                   std::int64_t stored, std::int64_t block_bytes, std::uintptr_t to) {
  const ArrangedSizes sizes{bits, inputs, groups, scale_bytes, block_bytes};
  const std::int64_t count = static_cast<std::int64_t>(outputs.size());
  check(sizes, count, true);
  check_outputs(outputs, stored);
  const StoredCodes given{pointer<const std::uint8_t>(codes), code_stride,
                          pointer<const std::uint8_t>(scales), scale_stride};
  py::gil_scoped_release release;
  arrange(given, sizes, outputs.data(), count, pointer<std::uint8_t>(to));
}

using AsRows = std::tuple<int, std::int64_t, std::int64_t, std::int64_t>;

StoredMatrix as_matrix(const std::vector<AsRows>& given, std::int64_t row_bytes,
                       std::int64_t outputs_per_row) {
  StoredMatrix made{{}, row_bytes, outputs_per_row};
  for (const auto& [file, offset, stride, rows] : given) {
    if (offset < 0 || rows < 0 || stride < row_bytes) {
      throw py::value_error("expected rows at " + std::to_string(row_bytes) +
                            " bytes or more from each other, got " + std::to_string(stride));
    }
    made.parts.push_back({file, offset, stride, rows});
  }
  return made;
}

std::pair<std::int64_t, std::int64_t> load_rows(const std::vector<AsRows>& codes, const std::vector<AsRows>& scales,
                       const std::string& scale, std::int64_t outputs_per_scale, bool is_widened,
                       float largest_scale, int no_number, std::int64_t inputs,
                       std::int64_t groups, int bits, const std::vector<std::int64_t>& outputs,
                       std::int64_t block_bytes, std::uintptr_t to) {
  const StoredScale type = named<StoredScale>("scales", scale,
                                              {{"none", StoredScale::kNone},
                                               {"float8_e8m0fnu", StoredScale::kE8m0},
                                               {"float8_e4m3fn", StoredScale::kE4m3},
                                               {"bfloat16", StoredScale::kBf16},
                                               {"float32", StoredScale::kFloat}});
  const bool has_scales = type != StoredScale::kNone;
  if (has_scales != (groups > 0) || has_scales == scales.empty() || outputs_per_scale < 1 ||
      (is_widened && type != StoredScale::kBf16) || no_number < 0 || no_number > 255) {
    throw py::value_error("expected scales and groups, or neither");
  }
  const std::int64_t bytes = stored_scale_bytes(type);
  Loaded given{as_matrix(codes, inputs * bits / 8, 1),
               as_matrix(scales, groups * bytes, outputs_per_scale),
               type,
               is_widened,
               largest_scale,
               static_cast<std::uint8_t>(no_number),
               {bits, inputs, groups, is_widened ? 4 : bytes, block_bytes}};
  const std::int64_t count = static_cast<std::int64_t>(outputs.size());
  check(given.sizes, count, has_scales);
  check_outputs(outputs, given.codes.outputs());
  if (has_scales) check_outputs(outputs, given.scales.outputs());
  try {
    py::gil_scoped_release release;
    const Wrong wrong = load(given, outputs.data(), count, pointer<std::uint8_t>(to));
    return {wrong.scales, wrong.codes};
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
  } catch (const FileTooShort&) {
    PyErr_SetString(PyExc_EOFError, "a file ends before its header says");
  }
  throw py::error_already_set();
}

}  // namespace

void bind_arrange(py::module_& module) {
  module.def("arrange", &arrange_codes, py::kw_only(), py::arg("codes"), py::arg("code_stride"),
             py::arg("scales"), py::arg("scale_stride"), py::arg("inputs"), py::arg("groups"),
             py::arg("scale_bytes"), py::arg("bits"), py::arg("outputs"), py::arg("stored"),
             py::arg("block_bytes"), py::arg("to"),
             "Bring codes and scales, by address, into blocks of 32 outputs.  Strides are bytes from\n"
             "one stored output to the next, of `stored` ones; `outputs` says which one is where.\n"
             "Raises ValueError: sizes that are none of a format's.");
  module.def("load", &load_rows, py::kw_only(), py::arg("codes"), py::arg("scales"),
             py::arg("scale"), py::arg("outputs_per_scale"), py::arg("is_widened"),
             py::arg("largest_scale"), py::arg("no_number"), py::arg("inputs"), py::arg("groups"),
             py::arg("bits"), py::arg("outputs"), py::arg("block_bytes"), py::arg("to"),
             "Read codes, or weights in bf16 (16 bits), and their scales from files, into blocks of 32\n"
             "outputs at an address.\n\n"
             "Both are lists of (descriptor, offset, bytes from a row to the next, rows), one behind\n"
             "the other; `outputs` says which stored one is where.  A row of scales, of the type\n"
             "`scale` or \"none\", belongs to `outputs_per_scale` outputs; bf16 is written as float32\n"
             "if `is_widened`.  Returns how many scales are infinite, NaN or above the largest, and how\n"
             "many codes of eight bits have all bits of `no_number`, unless it is 0.\n"
             "Raises ValueError: sizes that are none of a format's.  OSError: a file cannot be read.\n"
             "EOFError: one ends before these rows.");
}

}  // namespace ray_hetero

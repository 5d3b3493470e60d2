// A checkpoint's codes brought into the order of the kernels.

#include "../arrange.h"

#include "arguments.h"

namespace ray_hetero {
namespace {

void arrange_codes(std::uintptr_t codes, std::int64_t code_stride, std::uintptr_t scales,
                   std::int64_t scale_stride, std::int64_t inputs, std::int64_t groups,
                   std::int64_t scale_bytes, int bits, const std::vector<std::int64_t>& outputs,
                   std::int64_t stored, std::int64_t block_bytes, std::uintptr_t to) {
  const std::int64_t count = static_cast<std::int64_t>(outputs.size());
  if (count % kArranged != 0 || inputs <= 0 || inputs % 32 != 0) {
    throw py::value_error("expected outputs and inputs in multiples of 32, got " +
                          std::to_string(count) + " and " + std::to_string(inputs));
  }
  if ((bits != 4 && bits != 8) || (scale_bytes != 1 && scale_bytes != 2 && scale_bytes != 4)) {
    throw py::value_error("expected codes of 4 or 8 bits and scales of 1, 2 or 4 bytes, got " +
                          std::to_string(bits) + " and " + std::to_string(scale_bytes));
  }
  if (block_bytes < kArranged * (inputs * bits / 8 + groups * scale_bytes)) {
    throw py::value_error("blocks of " + std::to_string(block_bytes) + " bytes are too small");
  }
  for (const std::int64_t output : outputs) {
    if (output < 0 || output >= stored) {
      throw py::value_error("expected outputs below " + std::to_string(stored) + ", got " +
                            std::to_string(output));
    }
  }
  const StoredCodes given{pointer<const std::uint8_t>(codes), code_stride,
                          pointer<const std::uint8_t>(scales), scale_stride, inputs, groups,
                          scale_bytes};
  py::gil_scoped_release release;
  arrange(given, bits, outputs.data(), count, block_bytes, pointer<std::uint8_t>(to));
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
}

}  // namespace ray_hetero

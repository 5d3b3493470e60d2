// Reading a checkpoint's rows where there are none, or fewer than their header says.

#include "../../csrc/kernels/load.h"

#include <cstdio>
#include <cstdlib>

namespace {

using namespace ray_hetero;

void check(bool is_right, const char* what) {
  if (is_right) return;
  std::printf("wrong: %s\n", what);
  std::exit(1);
}

Loaded of_rows(std::vector<StoredRows> rows, std::int64_t inputs) {
  Loaded made{};
  made.codes = {std::move(rows), 2 * inputs, 1};
  made.scales = {{}, 0, 1};
  made.scale = StoredScale::kNone;
  made.sizes = {16, inputs, 0, 1, kArranged * 2 * inputs};
  return made;
}

}  // namespace

int main() {
  std::vector<std::uint8_t> to(kArranged * 64);
  const Wrong none = load(of_rows({}, 32), nullptr, 0, to.data());
  check(none.scales == 0 && none.codes == 0, "no codes");

  std::FILE* file = std::tmpfile();
  check(file != nullptr, "a file");
  std::vector<std::uint16_t> content(kArranged * 32);
  for (std::size_t i = 0; i < content.size(); ++i) content[i] = static_cast<std::uint16_t>(i);
  std::fwrite(content.data(), 2, content.size(), file);
  std::fflush(file);
  std::vector<std::int64_t> outputs(kArranged);
  for (std::int64_t one = 0; one < kArranged; ++one) outputs[one] = one;
  // A part without rows, before one with all.
  const int descriptor = fileno(file);
  const Loaded two = of_rows({{descriptor, 0, 64, 0}, {descriptor, 0, 64, kArranged}}, 32);
  load(two, outputs.data(), kArranged, to.data());
  std::uint16_t found;
  std::memcpy(&found, to.data() + 2 * 2, 2);  // output 1's first input lies behind output 0's two
  check(found == 32, "rows behind a part that has none");
  load(two, nullptr, 0, to.data());
  try {
    load(of_rows({{descriptor, 64, 64, kArranged}}, 32), outputs.data(), kArranged, to.data());
    check(false, "a file that is too short");
  } catch (const FileTooShort&) {
  }
  std::printf("right\n");
}

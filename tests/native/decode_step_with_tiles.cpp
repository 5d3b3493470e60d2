// A decode step by the way that AMX goes, its tokens as tiles from product to product, against the
// same step with AVX-512.
//
// Prints a line for each case that differs; the exit status is 1 then.

#include "software_tiles.h"

#include "../../csrc/kernels/decode_step.h"
#include "values.h"

#include <cmath>
#include <cstdio>
#include <deque>
#include <vector>

namespace {

using namespace ray_hetero;
using namespace values;

constexpr std::int64_t kHidden = 96, kWide = 1376, kHeads = 6, kKvHeads = 2, kSize = 32;
constexpr std::int64_t kQkv = (kHeads + 2 * kKvHeads) * kSize;
constexpr std::int64_t kBlockTokens = 32, kPositions = 128, kLayerCount = 3;

// Holds what its layers refer to.
class Model {
 public:
  Model() : norm_weight_(random(kHidden, 1, 1)), cos_sin_(random(kPositions * kSize, 0.5f, 2)) {
    layers.first = qkv_input();
    for (std::int64_t layer = 0; layer < kLayerCount; ++layer) {
      PostAttention post_attention{{weight(kHidden, kHeads * kSize)}, norm(), {weight(2 * kWide, kHidden)},
                      {weight(kHidden, kWide)}, {}};
      if (layer + 1 < kLayerCount) post_attention.next = qkv_input();
      const Rotation rotation{kHeads, kKvHeads, kSize, cos_sin_.data(), kSize, {}, {}};
      layers.layers.push_back({rotation, 0.2f, post_attention});
    }
  }

  DecoderLayers layers;

 private:
  Norm norm() const { return {norm_weight_.data(), 1e-5f}; }

  QkvInput qkv_input() { return {norm(), {weight(kQkv, kHidden)}}; }

  // Compact, with some weights that are in its list.
  Weight weight(std::int64_t n, std::int64_t k) {
    auto packed = random(n * k, 1 / std::sqrt(static_cast<float>(k)), 3 + held_.size());
    for (std::size_t i = 0; i < packed.size(); i += 499) packed[i] = narrowed(i % 2 ? 3 : -1e-9f);
    std::vector<std::uint8_t>& rows = rows_.emplace_back(n * k * 3 / 2);
    const Compact& compact = held_.emplace_back(packed.data(), n, k, rows.data());
    return {rows.data(), n, k, &compact};
  }

  std::vector<std::uint16_t> norm_weight_, cos_sin_;
  std::deque<std::vector<std::uint8_t>> rows_;
  std::deque<Compact> held_;
};

// y, then sum, of a step of m requests; keys and values of earlier tokens are the same each time.
std::vector<std::uint16_t> stepped(const Model& model, std::int64_t m, bool use_amx) {
  const std::int64_t blocks = kPositions / kBlockTokens;
  std::vector<std::int64_t> positions, slots;
  std::vector<std::int32_t> lengths, table;
  for (std::int64_t request = 0; request < m; ++request) {
    positions.push_back((37 * request + 5) % kPositions);
    lengths.push_back(static_cast<std::int32_t>(positions.back() + 1));
    slots.push_back(request * kPositions + positions.back());
    for (std::int64_t block = 0; block < blocks; ++block) {
      table.push_back(static_cast<std::int32_t>(request * blocks + block));
    }
  }
  const std::int64_t head_stride = 2 * kBlockTokens * kSize;
  std::deque<std::vector<std::uint16_t>> kept;
  std::vector<Cache> caches;
  for (std::int64_t layer = 0; layer < kLayerCount; ++layer) {
    kept.push_back(random(m * blocks * kKvHeads * head_stride, 1, 50 + layer));
    caches.push_back({kept.back().data(), kKvHeads * head_stride, head_stride});
  }
  const auto hidden = random(m * kHidden, 1, 60), residual = random(m * kHidden, 1, 61);
  std::vector<std::uint16_t> both(2 * m * kHidden);
  const Requests requests{m, positions.data(), slots.data(), lengths.data(), table.data(), blocks,
                          kBlockTokens, Layout::kTiles};
  run(model.layers, caches, requests,
      Step{hidden.data(), residual.data(), both.data(), both.data() + m * kHidden, use_amx});
  return both;
}

bool is_right(const Model& model, std::int64_t m, int threads) {
  omp_set_num_threads(threads);
  const auto expected = stepped(model, m, false), found = stepped(model, m, true);
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    difference = std::fmax(difference, std::fabs(as_float(found[i]) - as_float(expected[i])));
    size = std::fmax(size, std::fabs(as_float(expected[i])));
  }
  // Sums are rounded to bf16 after other orders of adding, layer after layer.
  if (size > 1 && difference <= size / 64) return true;
  std::printf("%lld requests, %d threads: values of up to %g differ by %g\n",
              static_cast<long long>(m), threads, size, difference);
  return false;
}

}  // namespace

int main() {
  if (!has_bf16()) return 77;
  const Model model;
  bool all = true;
  for (const int threads : {1, 3}) {
    for (const std::int64_t m : {1, 2, 8, 16, 17, 32}) all = is_right(model, m, threads) && all;
  }
  return all ? 0 : 1;
}

// y = x · Wᵀ + b by the way that AMX goes, against sums taken one by one.
//
// Prints a line for each case that differs; the exit status is 1 then.

#include "software_tiles.h"

#include "../../csrc/kernels/linear.h"
#include "values.h"

#include <cmath>
#include <cstdio>
#include <vector>

namespace {

using namespace values;
using ray_hetero::Compact;
using ray_hetero::Task;

// Where weight (output, input) is in packed rows.
std::int64_t place(std::int64_t output, std::int64_t input, std::int64_t k) {
  const std::int64_t row = output / ray_hetero::kBlock * (k / 2) + input / 2;
  return row * ray_hetero::kRow + output % ray_hetero::kBlock * 2 + input % 2;
}

bool is_right(std::int64_t m, std::int64_t n, std::int64_t k, bool is_compact, int threads) {
  omp_set_num_threads(threads);
  const float scale = 1 / std::sqrt(static_cast<float>(k));
  auto weight = random(n * k, scale, 1);
  // Some that a compact weight has to list.
  for (std::size_t i = 0; i < weight.size(); i += 499) weight[i] = narrowed(i % 2 ? 30 : -1e-9f);
  const std::int64_t stride = k + 32;
  const auto x = random(m * stride, 1, 2);
  std::vector<float> bias(n);
  for (std::int64_t i = 0; i < n; ++i) bias[i] = static_cast<float>(i % 7);
  std::vector<std::uint8_t> rows(n * k * 3 / 2);
  const Compact compact(weight.data(), n, k, rows.data());
  const ray_hetero::Weight packed{reinterpret_cast<const std::uint8_t*>(weight.data()), n, k};
  const ray_hetero::Weight held{rows.data(), n, k, &compact};
  std::vector<std::uint16_t> y(m * n);
  run(Task{x.data(), is_compact ? held : packed, bias.data(), y.data(), m, stride, true});
  for (std::int64_t token = 0; token < m; ++token) {
    for (std::int64_t output = 0; output < n; ++output) {
      double sum = bias[output], size = 0;
      for (std::int64_t input = 0; input < k; ++input) {
        const double product = static_cast<double>(ray_hetero::as_float(x[token * stride + input])) *
                               ray_hetero::as_float(weight[place(output, input, k)]);
        sum += product;
        size += std::fabs(product);
      }
      const double found = ray_hetero::as_float(y[token * n + output]);
      if (!(std::fabs(found - sum) <= std::fabs(sum) / 256 + size * 1e-5)) {
        std::printf("m %lld n %lld k %lld compact %d threads %d: y[%lld][%lld] = %g, not %g\n",
                    static_cast<long long>(m), static_cast<long long>(n), static_cast<long long>(k),
                    is_compact, threads, static_cast<long long>(token),
                    static_cast<long long>(output), found, sum);
        return false;
      }
    }
  }
  return true;
}

}  // namespace

int main() {
  if (!ray_hetero::has_bf16()) return 77;
  bool all = true;
  for (const bool is_compact : {false, true}) {
    for (const int threads : {1, 3}) {
      for (const std::int64_t m : {1, 2, 8, 16, 17, 32, 33, 70, 300}) {
        for (const auto& [n, k] : {std::pair{32, 32}, std::pair{96, 1376}, std::pair{160, 2080}}) {
          all = is_right(m, n, k, is_compact, threads) && all;
        }
      }
    }
  }
  return all ? 0 : 1;
}

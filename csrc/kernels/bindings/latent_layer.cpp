// Layers with multi-head latent attention.

#include "arguments.h"

namespace ray_hetero {
namespace {

void check(const LatentLayer& layer) {
  const LatentHeads& shape = layer.shape;
  const std::int64_t hidden = layer.down.w.k();
  for (const std::int64_t one : {shape.latent, shape.plain, shape.value, shape.size()}) {
    if (one <= 0 || one % kSpan != 0) {
      throw py::value_error("expected latents and parts of heads in multiples of 32");
    }
  }
  const bool fits = layer.down.w.n() == layer.query_latent() + shape.size() &&
                    (layer.query_norm || layer.queries.w.k() == hidden) &&
                    layer.queries.w.n() == shape.heads * shape.query() &&
                    layer.to_latent.n() == shape.heads * shape.latent &&
                    layer.to_latent.k() == shape.plain &&
                    layer.from_latent.n() == shape.heads * shape.value &&
                    layer.from_latent.k() == shape.latent &&
                    layer.behind.output.w.k() == shape.heads * shape.value &&
                    layer.behind.output.w.n() == hidden &&
                    layer.rotation.size == shape.rotated;
  if (!fits) throw py::value_error("expected the layers' inputs and outputs to fit together");
  if (layer.behind.has_mlp()) throw py::value_error("expected nothing behind the norm");
}

LatentLayer latent_layer(const std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                                          std::int64_t>& shape,
                         const AsNorm& norm, const AsLinear& down,
                         const std::optional<AsNorm>& query_norm, const AsLinear& queries,
                         const AsNorm& latent_norm, const Rotation& rotation,
                         const AsWeight& to_latent, const AsWeight& from_latent, float scale,
                         const PostAttention& behind) {
  const auto& [heads, latent, rotated, plain, value] = shape;
  if (heads <= 0) throw py::value_error("expected at least one head");
  LatentLayer made{{heads, latent, rotated, plain, value},
                   as_norm(norm),
                   as_linear(down),
                   as_optional_norm(query_norm),
                   as_linear(queries),
                   as_norm(latent_norm),
                   rotation,
                   as_weight(to_latent),
                   as_weight(from_latent),
                   scale,
                   behind};
  check(made);
  return made;
}

void run_latent_layer(const LatentLayer& layer, const Requests& requests,
                      const std::tuple<std::uintptr_t, std::int64_t, std::int64_t>& cache,
                      std::uintptr_t hidden, std::uintptr_t residual, std::uintptr_t y,
                      std::uintptr_t sum, const Level& level) {
  check_positions(layer.rotation, requests.positions, requests.m);
  const auto& [data, block_stride, token_stride] = cache;
  const LatentCache made{pointer<std::uint16_t>(data), block_stride, token_stride};
  const Step step{pointer<const std::uint16_t>(hidden), pointer<const std::uint16_t>(residual),
                  pointer<std::uint16_t>(y), pointer<std::uint16_t>(sum), nullptr};
  py::gil_scoped_release release;
  level.kernels.latent_layer(layer, made, requests, step);
}

}  // namespace

void bind_latent_layer(py::module_& module) {
  py::class_<LatentLayer>(module, "LatentLayer",
                          "A layer with multi-head latent attention, up to the norm before its\n"
                          "MLP or experts.")
      .def(py::init(&latent_layer), py::kw_only(), py::arg("shape"), py::arg("norm"),
           py::arg("down"), py::arg("query_norm"), py::arg("queries"), py::arg("latent_norm"),
           py::arg("rotation"), py::arg("to_latent"), py::arg("from_latent"), py::arg("scale"),
           py::arg("behind"),
           "`shape` is heads, elements of a latent, of the rotated part of keys and queries, of the\n"
           "plain part of queries, of values.  Norms and layers as in PostAttention: `down` gives the\n"
           "latent of queries if `query_norm` is not None, the latent, the rotated part of keys;\n"
           "`queries` gives [heads][plain, rotated].  Weights are (address, Encoding), neither with\n"
           "outliers: `to_latent` [heads * latent, plain], `from_latent` [heads * value, latent].\n"
           "`rotation` is of one rotated part; `behind` is without an MLP.  What all this\n"
           "points at must outlive it.\n"
           "Raises ValueError: shapes that do not fit together, or are no multiples of 32.")
      .def("run", &run_latent_layer, py::kw_only(), py::arg("requests"), py::arg("cache"),
           py::arg("hidden"), py::arg("residual"), py::arg("y"), py::arg("sum"), py::arg("level"),
           "A decode step: hidden, residual (or 0) → y, what the norm behind the attention gives, and\n"
           "sum, all [m, N], bf16, by address.  The cache is (address of [blocks, tokens of a block,\n"
           "latent and rotated part], strides of blocks and of tokens in elements).\n"
           "Raises ValueError: a position that cos_sin does not have.");
}

}  // namespace ray_hetero

// Sums over the ranks of a tensor-parallel group.

#include "arguments.h"

namespace ray_hetero {
namespace {

void run_rank_sums(RankSums& sums, std::uintptr_t x, std::int64_t elements, std::uintptr_t y,
                   const Level& level, std::int64_t times) {
  if (elements <= 0 || elements > sums.elements() || elements % kLanes != 0 || times < 1) {
    throw py::value_error("expected from 16 to " + std::to_string(sums.elements()) +
                          " elements in multiples of 16, got " + std::to_string(elements));
  }
  py::gil_scoped_release release;
  level.kernels.sum_over_ranks(sums, pointer<const float>(x), elements,
                               pointer<std::uint16_t>(y), times);
}

}  // namespace

void bind_rank_sums(py::module_& module) {
  py::register_exception<MissingRank>(module, "MissingRank", PyExc_RuntimeError);
  py::class_<RankSums>(module, "RankSums",
                       "Sums over the ranks of a tensor-parallel group, in memory that they share.")
      .def(py::init([](std::uintptr_t memory, std::int64_t bytes, std::int64_t elements,
                       std::vector<int> ranks, std::int64_t own, double limit_s,
                       std::vector<int> connections) {
             return std::make_unique<RankSums>(pointer<std::uint8_t>(memory), bytes, elements,
                                               std::move(ranks), own, limit_s,
                                               std::move(connections));
           }),
           py::kw_only(), py::arg("memory"), py::arg("bytes"), py::arg("elements"),
           py::arg("ranks"), py::arg("own"), py::arg("limit_s"), py::arg("connections"),
           "Memory by address, whose bytes were 0 before the first of the ranks made this; `ranks`\n"
           "are their numbers for messages, `own` this one's place among them.  A rank is waited\n"
           "for `limit_s` seconds.  `connections` are descriptors of sockets to the other ranks, -1\n"
           "for none, whose end is that of the rank.  All this must outlive this.\n"
           "Raises ValueError: memory of another size.")
      .def_static("bytes", &RankSums::needed, py::arg("ranks"), py::arg("elements"),
                  "Bytes of the memory for sums of so many elements.")
      .def_property_readonly(
          "own_pages",
          [](const RankSums& sums) {
            const auto at = [&](std::int64_t rank) {
              return RankSums::partial_at(sums.size(), sums.elements(), rank);
            };
            return std::pair(at(sums.own()), at(sums.own() + 1));
          },
          "First and last byte, the latter not included, of the pages that this rank writes.")
      .def("run", &run_rank_sums, py::kw_only(), py::arg("x"), py::arg("elements"), py::arg("y"),
           py::arg("level"), py::arg("times") = 1,
           "y [elements], bf16 = the sums of all ranks' x [elements], float32, by address; all ranks\n"
           "have to call it.  With `times` the same is done so often.\n"
           "Raises ValueError: more elements than there is memory for.  Raises MissingRank: a rank\n"
           "has ended, is late, or computes something else.");
}

}  // namespace ray_hetero

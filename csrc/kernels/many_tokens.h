// Products of a linear layer for many tokens, as prompts have them.
//
// Included once for each level, see levels.h.

namespace ray_hetero::RAY_HETERO_LEVEL {

class ManyTokens {
 public:
  explicit ManyTokens(const Task& task)
      : task_(task),
        threads_(omp_get_max_threads()),
        groups_((task.m + kPieceTokens - 1) / kPieceTokens),
        tokens_((task.m / kTile / 2 + groups_) / groups_ * kTile * 2),
        wide_(std::clamp<std::int64_t>(task.w.blocks() * groups_ / (4 * threads_), 1,
                                       kPieceBlocks)),
        columns_((task.w.blocks() + wide_ - 1) / wide_),
        packed_(kHasTiles ? scratch_bf16(task.m * task.w.k(), kSharedTokens) : nullptr),
        queue_(columns_ * groups_, threads_) {}

  void run() {
    Shortage shortage;
#pragma omp parallel num_threads(threads_)
    {
      const bool has = shortage.has([this] {
        scratch_bf16(kPieceRows * kRow, kExpanded);
        scratch(wide_ * tokens_ * kBlock, kSums);
      });
      if constexpr (kHasTiles) {
#pragma omp for schedule(static)
        for (std::int64_t tile = 0; tile < task_.w.pairs() / kTile; ++tile) {
          pack_tokens(task_, tile, tile + 1, packed_);
        }
      }
      const int thread = omp_get_thread_num();
      TileSetUp set_up;
      // Other threads take the units of one that has no memory.
      for (Units units; has && (units = queue_.next(thread)).count > 0;) sum(units.first, set_up);
      if constexpr (kHasTiles) release_tiles();
    }
    shortage.raise();
  }

 private:
  void sum(std::int64_t unit, TileSetUp& set_up) {
    const std::int64_t first = unit / groups_ * wide_;
    const std::int64_t last = std::min(first + wide_, task_.w.blocks());
    const std::int64_t begin = unit % groups_ * tokens_;
    const std::int64_t end = std::min(begin + tokens_, task_.m);
    const std::int64_t tokens = end - begin;
    if (tokens <= 0) return;
    const Places places{task_.m, kHasTiles ? task_.w.k() : task_.stride, kHasTiles};
    const TokenTiles x = places.tiles(kHasTiles ? packed_ : task_.x, 0).from_token(begin);
    float* sums = scratch((last - first) * tokens * kBlock, kSums);
    for (std::int64_t row = 0; row < task_.w.pairs(); row += kPieceRows) {
      const std::int64_t rows = std::min(kPieceRows, task_.w.pairs() - row);
      for (std::int64_t block = first; block < last; ++block) {
        add_piece(x.from_row(row), tokens, piece_of(task_.w, block, row, rows), row == 0, set_up,
                  sums + (block - first) * tokens * kBlock);
      }
    }
    for (std::int64_t block = first; block < last; ++block) {
      for (std::int64_t token = 0; token < tokens; ++token, sums += kBlock) {
        store_token(task_, begin + token, block, sums);
      }
    }
  }

  const Task& task_;
  const int threads_;
  const std::int64_t groups_, tokens_;  // groups of tokens, and tokens of each
  const std::int64_t wide_, columns_;   // blocks of a unit, and units of a group
  std::uint16_t* packed_;               // [k / 32][m][32]
  WorkQueue queue_;
};

}  // namespace ray_hetero::RAY_HETERO_LEVEL

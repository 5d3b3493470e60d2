// y = x · Wᵀ + b in bf16, for the linear layers of a CPU rank.
//
// Included once for each level, see levels.h.
//
// Few tokens (a decode step): every weight is read once, so the only thing that counts is that all
// threads stream W without a pause.  W is cut into units of up to 64 KiB, parts of blocks; each thread
// gets a run of neighbouring units, and who has finished takes units from the end of others' runs.
// Many tokens (a prefill): the tiles' multiplications count.  Tokens and a piece of W that fit
// together into the second-level cache are multiplied piece by piece.
//
// A sum is always taken over the same pieces in the same order, whichever thread took them: the
// result depends neither on the number of threads nor on chance.

namespace ray_hetero::RAY_HETERO_LEVEL {

RAY_HETERO_INLINE void store_token(const Task& task, std::int64_t token, std::int64_t block,
                                   const float* sums) {
  for (int half = 0; half < kBlock; half += kLanes) {
    const std::int64_t at = block * kBlock + half;
    Floats sum = load_floats(sums + half);
    if (task.bias != nullptr) sum = plus(sum, load_floats(task.bias + at));
    if (task.partial != nullptr) {
      store_floats(task.partial + token * task.w.n() + at, sum);
    } else {
      store_bf16(task.y + token * task.w.n() + at, sum);
    }
  }
}

// ---- rows in bf16 -------------------------------------------------------------------------------

// Sums [M][kBlock] of M tokens plus what some rows in bf16 add to them.
template <int M>
void add_rows(const std::uint16_t* x, std::int64_t stride, const std::uint16_t* w,
              std::int64_t rows, bool is_first, float* to) {
  Sums<M> sums;
  if (is_first) {
    sums.clear();
  } else {
    sums.load(to, kBlock);
  }
  for (std::int64_t row = 0; row < rows; ++row, x += 2, w += kRow) {
    add_row<M>(x, stride, load_pairs(w), load_pairs(w + kBlock), sums);
  }
  sums.store(to, kBlock);
}

using AddRows = void (*)(const std::uint16_t*, std::int64_t, const std::uint16_t*, std::int64_t,
                         bool, float*);
template <int... kLess>
constexpr std::array<AddRows, kGroup> add_rows_of(std::integer_sequence<int, kLess...>) {
  return {add_rows<kLess + 1>...};
}
constexpr std::array<AddRows, kGroup> kAddRows =
    add_rows_of(std::make_integer_sequence<int, kGroup>());

// ---- rows of a format ---------------------------------------------------------------------------

// Sums [M][kBlock] of M tokens, whose pairs for these rows begin at x.
template <int M, typename Rows>
void sum_rows(const std::uint16_t* x, std::int64_t stride, const Stretch& stretch, float* to) {
  Sums<M> sums;
  sums.clear();
  Rows rows(stretch);
  for (std::int64_t row = 0; row < stretch.rows; row += 2, x += 4) {
    prefetch_lines(rows.at(), Rows::kPairBytes);
    const TwoRows two = rows.next();
    add_row<M>(x, stride, two.left[0], two.right[0], sums);
    add_row<M>(x + 2, stride, two.left[1], two.right[1], sums);
  }
  sums.store(to, kBlock);
}

// Rows in bf16; those that are not lie in `room` then.
template <typename Rows>
const std::uint16_t* expanded(const Stretch& stretch, std::uint16_t* room) {
  if constexpr (Rows::kIsExpanded) {
    return reinterpret_cast<const std::uint16_t*>(stretch.data);
  } else {
    Rows rows(stretch);
    expand_rows(rows, stretch.rows, room);
    return room;
  }
}

// Sums of up to 32 tokens, whose tiles for these rows begin at x, `step` elements apart.
template <bool kTwo, typename Rows>
void sum_tiles(const std::uint16_t* x, std::int64_t step, const Stretch& stretch, float* sums) {
  clear_sums<kTwo>();
  const std::int64_t tiles = stretch.rows / kTile;
  if constexpr (Rows::kIsExpanded) {
    const std::uint8_t* w = stretch.data;
    for (std::int64_t tile = 0; tile < tiles; ++tile, x += step, w += kTile * kRowBytes) {
      prefetch_lines(w, kTile * kRowBytes);
      multiply<kTwo>(x, reinterpret_cast<const std::uint16_t*>(w));
    }
  } else {
    // A tile cannot be loaded from stores that are still on their way to the cache, so the next
    // tiles are expanded while this one is multiplied.
    std::uint16_t* ring = scratch_bf16(kRing * kTile * kRow, kExpanded);
    Rows rows(stretch);
    for (std::int64_t tile = -kAhead; tile < tiles; ++tile) {
      if (tile + kAhead < tiles) {
        prefetch_lines(rows.at(), kTile / 2 * Rows::kPairBytes);
        expand_rows(rows, kTile, ring + (tile + kAhead) % kRing * kTile * kRow);
      }
      if (tile >= 0) multiply<kTwo>(x + tile * step, ring + tile % kRing * kTile * kRow);
    }
  }
  store_sums<kTwo>(sums);
}

// Sums [m][kBlock] of tokens, of rows that are expanded for all of them.
template <typename Rows>
void sum_expanded(const TokenTiles& x, std::int64_t m, const Stretch& stretch, float* sums) {
  std::uint16_t* room = scratch_bf16(kExpandedRows * kRow, kExpanded);
  Rows rows(stretch);
  for (std::int64_t row = 0; row < stretch.rows; row += kExpandedRows) {
    const std::int64_t count = std::min(kExpandedRows, stretch.rows - row);
    for (std::int64_t at = 0; at < count; at += 2) {
      prefetch_lines(rows.at(), Rows::kPairBytes);
      expand_rows(rows, 2, room + at * kRow);
    }
    for (std::int64_t token = 0; token < m; token += kGroup) {
      kAddRows[std::min<std::int64_t>(kGroup, m - token) - 1](
          x.at(row) + token * x.token, x.token, room, count, row == 0, sums + token * kBlock);
    }
  }
}

// What a format's rows are computed with.
struct RowKernels {
  using SumRows = void (*)(const std::uint16_t*, std::int64_t, const Stretch&, float*);
  SumRows sum[kGroup];   // for one token and more; where there are neither tiles nor codes
  SumRows sum_tiles[2];  // for one tile of tokens and two; where there are tiles
  CodeKernels::SumOfTokens sum_expanded;  // of scaled codes; where there are no tiles
  const std::uint16_t* (*expanded)(const Stretch&, std::uint16_t*);
  bool has_codes;
  CodeKernels codes;  // if it has
};

template <typename Rows, int... kLess>
constexpr RowKernels row_kernels(std::integer_sequence<int, kLess...> less) {
  RowKernels kernels{{}, {}, nullptr, expanded<Rows>, Rows::kHasCodes, {}};
  if constexpr (Rows::kHasCodes) kernels.codes = code_kernels<typename Rows::Codes>(less);
  if constexpr (kHasTiles) {
    kernels.sum_tiles[0] = sum_tiles<false, Rows>;
    kernels.sum_tiles[1] = sum_tiles<true, Rows>;
  } else if constexpr (Rows::kHasCodes) {
    kernels.sum_expanded = sum_expanded<Rows>;
  } else {
    const typename RowKernels::SumRows sum[] = {sum_rows<kLess + 1, Rows>...};
    for (int i = 0; i < kGroup; ++i) kernels.sum[i] = sum[i];
  }
  return kernels;
}

#define RAY_HETERO_FORMAT(name) row_kernels<name##Rows>(std::make_integer_sequence<int, kGroup>()),
constexpr RowKernels kRowKernels[] = {RAY_HETERO_FORMATS(RAY_HETERO_FORMAT)};
#undef RAY_HETERO_FORMAT

inline const RowKernels& kernels_of(const Stretch& stretch) {
  return kRowKernels[static_cast<int>(stretch.format)];
}

// A thread's own memory for such sums.
inline void reserve_few(std::int64_t m) {
  constexpr std::int64_t kRows = kHasTiles ? std::max(kRing, kCodesRing) * kTile : kExpandedRows;
  scratch_bf16(kRows * kRow, kExpanded);
  if constexpr (kHasTiles) scratch(2 * m * kBlock, kGroupSums);
  ScalesAhead::reserve();
}

// The encoding of a weight whose groups have zero points, or nullptr.
inline const Scaled* with_zeros(const Weight& w) {
  const bool has_codes = kernels_of(w.stretch(0, 0, 2)).has_codes;
  const auto* scaled = has_codes ? static_cast<const Scaled*>(w.encoding) : nullptr;
  return scaled != nullptr && scaled->has_zeros() ? scaled : nullptr;
}

// Sums [m][kBlock] of up to 32 tokens, whose tiles are set up where there are any.
inline void sum_few(const TokenTiles& x, std::int64_t m, const Stretch& stretch, float* sums) {
  const RowKernels& kernels = kernels_of(stretch);
  if (kernels.has_codes && is_for_codes(m, stretch)) {
    sum_codes(kernels.codes, x, m, stretch, sums);
  } else if constexpr (kHasTiles) {
    kernels.sum_tiles[m > kTile](x.data, x.tile, stretch, sums);
  } else if (kernels.has_codes) {
    kernels.sum_expanded(x, m, stretch, sums);
  } else {
    for (std::int64_t token = 0; token < m; token += kGroup) {
      const auto group = std::min<std::int64_t>(kGroup, m - token);
      kernels.sum[group - 1](x.data + token * x.token, x.token, stretch, sums + token * kBlock);
    }
  }
}

// What outliers of one output add to the sums [tokens][kBlock] of tokens from `begin` on.
inline void add_outliers_of_output(const Task& task, const Outliers& outliers, std::int64_t begin,
                                   std::int64_t tokens, float* sums) {
  const Places places = task.places();
  const std::int64_t step = places.at(1, 0) - places.at(0, 0);
  for (std::int64_t token = 0; token < tokens; token += kLanes) {
    Floats sum = zeros();
    for (const Outlier& one : outliers) {
      const std::uint16_t* pairs = task.x + places.at(begin + token, one.k & ~1u);
      const Floats x = gathered(pairs, one.k % 2 != 0, step, tokens - token);
      sum = times_plus(spread(as_float(one.value)), x, sum);
    }
    float added[kLanes];
    store_floats(added, sum);
    for (std::int64_t i = 0; i < std::min<std::int64_t>(kLanes, tokens - token); ++i) {
      sums[(token + i) * kBlock] += added[i];
    }
  }
}

// What a block's outliers add to the sums [tokens][kBlock] of tokens from `begin` on.
inline void add_outliers(const Task& task, std::int64_t block, std::int64_t begin,
                         std::int64_t tokens, float* sums) {
  const Outliers all = task.w.encoding->outliers(block);
  if (tokens <= kScalarTokens) {
    const Places places = task.places();
    for (const Outlier& one : all) {
      for (std::int64_t token = 0; token < tokens; ++token) {
        const float x = as_float(task.x[places.at(begin + token, one.k)]);
        sums[token * kBlock + one.output] += as_float(one.value) * x;
      }
    }
    return;
  }
  // Those of an output are neighbours.
  for (const Outlier *first = all.begin(), *last = first; first != all.end(); first = last) {
    while (last != all.end() && last->output == first->output) ++last;
    add_outliers_of_output(task, {first, last}, begin, tokens, sums + first->output);
  }
}

// A stretch's rows in bf16 with its block's outliers, in `room` unless they lie in memory so.
inline const std::uint16_t* expanded(const Stretch& stretch, const Outliers& outliers,
                                     std::uint16_t* room) {
  const std::uint16_t* rows = kernels_of(stretch).expanded(stretch, room);
  for (const Outlier& one : outliers) {
    const std::int64_t row = one.k / 2 - stretch.first;
    if (row >= 0 && row < stretch.rows) room[row * kRow + 2 * one.output + one.k % 2] = one.value;
  }
  return rows;
}

// The packed rows of a weight.
inline void expand(const Weight& weight, std::uint16_t* packed) {
#pragma omp parallel for schedule(static)
  for (std::int64_t block = 0; block < weight.blocks(); ++block) {
    const std::int64_t elements = weight.pairs() * kRow;
    std::uint16_t* to = packed + block * elements;
    const Stretch stretch = weight.stretch(block, 0, weight.pairs());
    const std::uint16_t* from = expanded(stretch, weight.encoding->outliers(block), to);
    if (from != to) std::memcpy(to, from, elements * sizeof(std::uint16_t));
  }
}

// x [m][stride] as tiles [k / 32][m][32], so that the rows of a tile are neighbours.
inline void pack_tokens(const Task& task, std::int64_t begin, std::int64_t end,
                        std::uint16_t* packed) {
  const Places rows = task.places(), tiles{task.m, task.w.k(), true};
  for (std::int64_t token = 0; token < task.m; ++token) {
    for (std::int64_t at = begin * 2 * kTile; at < end * 2 * kTile; at += 2 * kTile) {
      store_pairs(packed + tiles.at(token, at), load_pairs(task.x + rows.at(token, at)));
    }
  }
}

// Sums [tokens][kBlock] of tokens from `begin` on plus what some rows in bf16 add to them.
inline void add_tokens(const Task& task, std::int64_t begin, std::int64_t tokens,
                       std::int64_t row, std::int64_t rows, const std::uint16_t* w, bool is_first,
                       float* sums) {
  for (std::int64_t token = 0; token < tokens; token += kGroup) {
    const auto group = std::min<std::int64_t>(kGroup, tokens - token);
    kAddRows[group - 1](task.x + (begin + token) * task.stride + 2 * row, task.stride, w, rows,
                        is_first, sums + token * kBlock);
  }
}

// ---- few tokens ---------------------------------------------------------------------------------

class FewTokens {
 public:
  explicit FewTokens(const Task& task)
      : task_(task),
        parts_((task.w.pairs() + kUnitRows - 1) / kUnitRows),
        rows_((task.w.pairs() / kTile + parts_ - 1) / parts_ * kTile),
        threads_(omp_get_max_threads()),
        queue_(task.w.blocks() * parts_, threads_),
        zeros_(with_zeros(task.w)),
        missing_(new std::atomic<int>[task.w.blocks()]),
        sums_(reserve(task.w, task.m)) {
    for (std::int64_t block = 0; block < task.w.blocks(); ++block) {
      missing_[block].store(static_cast<int>(parts_), std::memory_order_relaxed);
    }
  }

  void run() {
    Shortage shortage;
#pragma omp parallel num_threads(threads_)
    {
      // Other threads take the units of one that has no memory.
      const bool has = shortage.has([this] { reserve_own(task_); });
      if (has) work(omp_get_thread_num());
    }
    shortage.raise();
  }

  // Memory for the sums; products that share it have to reserve it before the first one begins.
  static float* reserve(const Weight& w, std::int64_t m) {
    const std::int64_t parts = (w.pairs() + kUnitRows - 1) / kUnitRows;
    return scratch(static_cast<std::size_t>(w.blocks() * parts * m * kBlock), kSums);
  }

  // A thread's own memory, which it has to have before it begins to work.
  static void reserve_own(const Task& task) {
    scratch(2 * task.m * kBlock, kOwnSums);
    if constexpr (kHasTiles) {
      if (!task.x_is_tiles) scratch_bf16(task.m * task.w.k(), kOwnTokens);
    }
    reserve_few(task.m);
    if (const Scaled* scaled = with_zeros(task.w)) scratch(task.m * scaled->groups(), kInputSums);
  }

  // The first weights of this thread's share.
  ReadAhead ahead(int thread) const {
    const Units units = queue_.first(thread);
    if (units.count == 0) return {nullptr, 0};
    const std::int64_t block = units.first / parts_, row = units.first % parts_ * rows_;
    const Stretch stretch = task_.w.stretch(block, row, rows_);
    return {stretch.data, units.count * rows_ / 2 * stretch.pair_bytes};
  }

  // One thread's share of the work; all of the team's threads have to come.
  void work(int thread) {
    const std::uint16_t* data = task_.x;
    if constexpr (kHasTiles) {
      if (!task_.x_is_tiles) data = own_tiles();
      configure_tiles(task_.m);
    }
    const Places places{task_.m, kHasTiles ? task_.w.k() : task_.stride, kHasTiles};
    TokenTiles tokens = places.tiles(data, 0);
    if (zeros_ != nullptr) {
      float* sums = scratch(task_.m * zeros_->groups(), kInputSums);
      sum_groups(*zeros_, tokens, task_.m, sums);
      tokens.group_sums = sums, tokens.groups = zeros_->groups();
    }
    for (Units units; (units = queue_.next(thread, parts_)).count > 0;) {
      if (units.count == parts_) {
        whole_block(units.first / parts_, tokens);
      } else {
        one_part(units.first, tokens);
      }
    }
    if constexpr (kHasTiles) release_tiles();
  }

 private:
  // A copy for each thread: a shared one would have all of them wait until it is there.
  const std::uint16_t* own_tiles() const {
    std::uint16_t* tiles = scratch_bf16(task_.m * task_.w.k(), kOwnTokens);
    pack_tokens(task_, 0, task_.w.pairs() / kTile, tiles);
    return tiles;
  }

  // All parts of a block, whose sums stay with this thread.
  void whole_block(std::int64_t block, const TokenTiles& tokens) {
    const std::int64_t floats = task_.m * kBlock;
    float* sums = scratch(2 * floats, kOwnSums);
    for (std::int64_t part = 0; part < parts_; ++part) {
      float* to = part == 0 ? sums : sums + floats;
      sum(block * parts_ + part, tokens, to);
      if (part > 0) add(sums, to);
    }
    store(block, sums);
  }

  // One part; who computes the last of a block puts them together.
  void one_part(std::int64_t unit, const TokenTiles& tokens) {
    const std::int64_t block = unit / parts_, floats = task_.m * kBlock;
    sum(unit, tokens, sums_ + unit * floats);
    if (missing_[block].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    float* sums = sums_ + block * parts_ * floats;
    for (std::int64_t part = 1; part < parts_; ++part) add(sums, sums + part * floats);
    store(block, sums);
  }

  void sum(std::int64_t unit, const TokenTiles& tokens, float* sums) const {
    const std::int64_t block = unit / parts_, row = unit % parts_ * rows_;
    const Stretch stretch =
        task_.w.stretch(block, row, std::min(rows_, task_.w.pairs() - row));
    sum_few(tokens.from_row(row), task_.m, stretch, sums);
  }

  void add(float* sums, const float* more) const {
    for (std::int64_t at = 0; at < task_.m * kBlock; at += kLanes) {
      store_floats(sums + at, plus(load_floats(sums + at), load_floats(more + at)));
    }
  }

  void store(std::int64_t block, float* sums) const {
    add_outliers(task_, block, 0, task_.m, sums);
    for (std::int64_t token = 0; token < task_.m; ++token, sums += kBlock) {
      store_token(task_, token, block, sums);
    }
  }

  const Task& task_;
  const std::int64_t parts_, rows_;  // units of a block, and rows of each
  const int threads_;
  WorkQueue queue_;
  const Scaled* const zeros_;  // as with_zeros
  std::unique_ptr<std::atomic<int>[]> missing_;  // units of each block that are not done
  float* sums_;                                  // [units][m][kBlock]
};

// ---- many tokens --------------------------------------------------------------------------------

// Sums [tokens][kBlock] plus what `rows` rows in bf16 add to them, for up to 32 tokens whose tiles
// begin at x, `step` elements apart; meanwhile `lines` lines a tile are read ahead from `next` on.
template <bool kTwo>
void add_group(const std::uint16_t* x, std::int64_t step, const std::uint16_t* w,
               std::int64_t rows, bool is_first, const std::uint8_t* next, std::int64_t lines,
               float* sums) {
  if (is_first) {
    clear_sums<kTwo>();
  } else {
    load_sums<kTwo>(sums);
  }
  for (std::int64_t row = 0; row < rows; row += kTile, x += step) {
    for (std::int64_t line = 0; line < lines; ++line, next += kLineBytes) prefetch_l2(next);
    multiply<kTwo>(x, w + row * kRow);
  }
  store_sums<kTwo>(sums);
}

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
      // Other threads take the units of one that has no memory.
      for (Units units; has && (units = queue_.next(thread)).count > 0;) sum(units.first);
      if constexpr (kHasTiles) release_tiles();
    }
    shortage.raise();
  }

 private:
  void sum(std::int64_t unit) {
    const std::int64_t first = unit / groups_ * wide_;
    const std::int64_t last = std::min(first + wide_, task_.w.blocks());
    const std::int64_t begin = unit % groups_ * tokens_;
    const std::int64_t end = std::min(begin + tokens_, task_.m);
    const std::int64_t tokens = end - begin;
    if (tokens <= 0) return;
    float* sums = scratch((last - first) * tokens * kBlock, kSums);
    for (std::int64_t row = 0; row < task_.w.pairs(); row += kPieceRows) {
      const std::int64_t rows = std::min(kPieceRows, task_.w.pairs() - row);
      for (std::int64_t block = first; block < last; ++block) {
        add_piece(block, row, rows, begin, tokens, sums + (block - first) * tokens * kBlock);
      }
    }
    for (std::int64_t block = first; block < last; ++block) {
      for (std::int64_t token = 0; token < tokens; ++token, sums += kBlock) {
        store_token(task_, begin + token, block, sums);
      }
    }
  }

  void add_piece(std::int64_t block, std::int64_t row, std::int64_t rows, std::int64_t begin,
                 std::int64_t tokens, float* sums) {
    const Stretch stretch = task_.w.stretch(block, row, rows);
    std::uint16_t* room = scratch_bf16(kPieceRows * kRow, kExpanded);
    // Once here, and not once a token.
    const std::uint16_t* w = expanded(stretch, task_.w.encoding->outliers(block), room);
    if constexpr (kHasTiles) {
      add_tiles(stretch, w, begin, tokens, sums);
    } else {
      add_tokens(task_, begin, tokens, row, rows, w, row == 0, sums);
    }
  }

  void add_tiles(const Stretch& stretch, const std::uint16_t* w, std::int64_t begin,
                 std::int64_t tokens, float* sums) {
    const std::int64_t row = stretch.first, rows = stretch.rows, step = task_.m * 2 * kTile;
    // The same block's next rows; they are read while this piece is multiplied.
    const std::uint8_t* next = stretch.data + rows / 2 * stretch.pair_bytes;
    const std::int64_t groups = (tokens + 2 * kTile - 1) / (2 * kTile);
    const std::int64_t tile_lines = kTile / 2 * stretch.pair_bytes / kLineBytes;
    const std::int64_t lines = (tile_lines + groups - 1) / groups;
    for (std::int64_t token = 0; token < tokens; token += 2 * kTile) {
      const std::int64_t here = std::min<std::int64_t>(2 * kTile, tokens - token);
      if (token == 0 || here < 2 * kTile) configure_tiles(here);
      const auto add = here > kTile ? add_group<true> : add_group<false>;
      add(packed_ + row / kTile * step + (begin + token) * 2 * kTile, step, w, rows,
          row == 0, next + token / (2 * kTile) * rows / kTile * lines * kLineBytes, lines,
          sums + token * kBlock);
    }
  }

  const Task& task_;
  const int threads_;
  const std::int64_t groups_, tokens_;  // groups of tokens, and tokens of each
  const std::int64_t wide_, columns_;   // blocks of a unit, and units of a group
  std::uint16_t* packed_;               // [k / 32][m][32]
  WorkQueue queue_;
};

inline void run(const Task& given) {
  Task task = given;
  for (std::int64_t left = task.m; left > 0; left -= task.m) {
    task.m = std::min(left, kSlab);
    if (task.m > kFewTokens) {
      ManyTokens(task).run();
    } else {
      FewTokens(task).run();
    }
    task.x += task.m * task.stride;
    task.y += task.m * task.w.n();
  }
}

}  // namespace ray_hetero::RAY_HETERO_LEVEL

// How large the pieces of work are.

#pragma once

#include <cstdint>

namespace ray_hetero {

constexpr std::int64_t kUnitRows = 512;     // most rows of a unit of few tokens
constexpr std::int64_t kFewTokens = 32;     // two tiles
constexpr std::int64_t kStepTokens = 128;   // most of a decode step that is one native call
// Most inputs of a unit of more than few tokens of such a step, in bf16: half of a second-level cache.
// With half of that, blocks of 4,096 inputs have several units, whose sums for 128 tokens are as large
// as half of the weights and go through memory: a step takes 1.15 times as long.
constexpr std::int64_t kStepInputBytes = 1 << 20;
constexpr std::int64_t kScalarTokens = 8;   // up to which outliers are added one by one: faster than gathers
constexpr std::int64_t kAhead = 2;          // tiles that are expanded before they are needed
constexpr std::int64_t kRing = 4;           // tiles that are kept expanded
static_assert(kRing > kAhead);
constexpr std::int64_t kCodesAhead = 3;     // the same of codes: an odd number, as loads wait for those stores
constexpr std::int64_t kCodesRing = 4;      // before them that are a multiple of 4 KiB, two tiles, away
static_assert(kCodesRing > kCodesAhead);
constexpr std::int64_t kTokensAhead = 2;    // tiles of tokens that are fetched before they are needed
constexpr std::int64_t kDirectTokens = 1;   // whose products with codes need no tiles
constexpr std::int64_t kFloatTokens = 3;    // up to which inputs become floats where codes of four bits do
// Up to which codes are multiplied as they are where their groups are no whole tiles; then weights
// are scaled.  NVFP4's, of 16 inputs: without tiles 0.88 of the time of scaled weights for 8 tokens,
// 1.25 for 32 (AVX2); beside scaled weights in tiles 0.77 for 2 tokens, 1.7 for 8 (AMX).
constexpr std::int64_t kTokensOfShortGroups = 8;
constexpr std::int64_t kTokensBesideTiles = 3;
constexpr std::int64_t kExpandedRows = 64;  // expanded for some tokens at once; half an L1 cache
constexpr std::int64_t kPieceTokens = 256;  // most tokens of a unit of many
constexpr std::int64_t kPieceBlocks = 4;    // and most blocks
constexpr std::int64_t kSlab = 1024;        // most tokens at once; bounds the memory for them

constexpr std::int64_t kChunk = 128;     // tokens whose scores are kept; parts are multiples of it
constexpr std::int64_t kMostParts = 64;  // of a request, where a step has few tokens
constexpr std::int64_t kLatentParts = 128;  // of all requests; each keeps the sums of all heads
// Cached tokens from which requests that share them are attended together: fewer stay in the caches,
// and there is more to share out among threads.
constexpr std::int64_t kTogetherTokens = 1024;
constexpr std::int64_t kSpan = 32;       // tokens at once; blocks are multiples of it

}  // namespace ray_hetero

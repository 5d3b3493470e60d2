// Packed weights: the layout of vLLM's packed kernels, [N / 32][K / 2][32][2], bf16.
//
// A row of 128 bytes holds two k of 32 outputs (a block), which is what both VDPBF16PS and TDPBF16PS
// multiply.

#pragma once

#include <cstdint>

namespace ray_hetero {

constexpr int kBlock = 32;           // outputs of a block
constexpr int kRow = 2 * kBlock;     // elements of a row
constexpr int kRowBytes = 2 * kRow;  // of a packed row
constexpr int kTile = 16;            // tokens, outputs and pairs of k of an AMX tile

}  // namespace ray_hetero

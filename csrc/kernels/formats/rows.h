// What all formats of weights have in common.
//
// A weight [n, k] is cut into blocks of 32 outputs.  However it lies in memory, it is multiplied as
// rows: a row holds two k of the 32 outputs of a block, bf16, which is what both VDPBF16PS and
// TDPBF16PS multiply.

#pragma once

#include <cstdint>

namespace ray_hetero {

constexpr int kBlock = 32;           // outputs of a block
constexpr int kRow = 2 * kBlock;     // elements of a row
constexpr int kRowBytes = 2 * kRow;  // of a row in bf16
constexpr int kTile = 16;            // tokens, outputs and rows of an AMX tile

}  // namespace ray_hetero

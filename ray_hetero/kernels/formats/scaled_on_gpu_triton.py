"""The kernel of scaled_on_gpu.py, a module of its own because it imports Triton.

The layouts are those of csrc/kernels/formats/int4.h, int8.h and fp8.h, of which each has words of
16 bits, 32 for two inputs of a block's outputs, or for four in codes of four bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _e4m3(codes):  # type: ignore[no-untyped-def]
    """E4M3 as float32: its bits are those of a float16 of 2^-8 times the value."""
    halves = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    return halves.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256


@triton.jit
def _e2m1(codes):  # type: ignore[no-untyped-def]
    """E2M1 as float32: its bits are those of a float16 of 2^-14 times the value."""
    halves = ((codes & 8) << 12) | ((codes & 7) << 9)
    return halves.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384


@triton.jit  # type: ignore[untyped-decorator]
def kernel(  # type: ignore[no-untyped-def]
    rows, words, scales, weight, inputs, stride, scales_at, zeros_at, group, factor,
    KIND: tl.constexpr, SCALE: tl.constexpr, OUTPUTS: tl.constexpr, ZERO: tl.constexpr,  # noqa: N803
    HAS_ZEROS: tl.constexpr, ROWS: tl.constexpr, IS_ONE_GROUP: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Expand some rows of words of a block, [ROWS, 32] of 16 bits.

    KIND and SCALE name the codes' and the scales' types; OUTPUTS is the number of scales of a group
    in a block; `stride` and what ends with `_at` are bytes of a block.
    """
    block = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * ROWS
    width: tl.constexpr = 4 if KIND == "int4" or KIND == "fp4" else 2
    row = first + tl.arange(0, ROWS)
    there = (row < inputs // width)[:, None]
    at = block * (stride // 2) + row[:, None] * 32 + tl.arange(0, 32)[None, :]
    both = tl.load(words + at, mask=there, other=0).to(tl.int32)
    if width == 4:
        # A word has outputs o and 16 + o of two rows: nibbles 0 and 1 of the first, 2 and 3 of the
        # second.
        left = tl.join(both & 15, (both >> 4) & 15)
        right = tl.join((both >> 8) & 15, (both >> 12) & 15)
        codes = tl.join(left, right)
        # [row, output, input, half, row of two] → [half, output, row, row of two, input]
        codes = tl.reshape(codes, (ROWS, 16, 2, 2, 2))
        codes = tl.permute(codes, (3, 1, 0, 4, 2))
    elif KIND == "fp8":
        codes = tl.join(both & 255, (both >> 8) & 255)
        # [row, output, input, half] → [half, output, row, input]
        codes = tl.permute(tl.reshape(codes, (ROWS, 16, 2, 2)), (3, 1, 0, 2))
    else:
        codes = tl.join(both & 255, (both >> 8) & 255)
        # [row, output, half, input] → [half, output, row, input]
        codes = tl.permute(tl.reshape(codes, (ROWS, 16, 2, 2)), (2, 1, 0, 3))
    codes = tl.reshape(codes, (32, width * ROWS))
    if KIND == "fp8":
        values = _e4m3(codes)
    elif KIND == "fp4":
        values = _e2m1(codes)
    else:
        values = codes.to(tl.float32)
    output = tl.arange(0, 32)
    column = width * first + tl.arange(0, width * ROWS)
    if IS_ONE_GROUP:
        groups = (width * first) // group + tl.zeros((32, 1), tl.int32)
        known = groups >= 0
    else:
        groups = (column // group)[None, :] + tl.zeros((32, 1), tl.int32)
        known = (column < inputs)[None, :] & (groups >= 0)
    if HAS_ZEROS:
        place = block * stride + zeros_at + groups * 32 + output[:, None]
        values -= tl.load(rows + place, mask=known, other=0).to(tl.float32)
    else:
        values -= ZERO
    own = output[:, None] if OUTPUTS == 32 else output[:, None] * 0
    place = groups * OUTPUTS + own
    if SCALE == "float32":
        scale = tl.load(scales + (block * stride + scales_at) // 4 + place, mask=known, other=0)
    elif SCALE == "bfloat16":
        scale = tl.load(scales + (block * stride + scales_at) // 2 + place, mask=known, other=0)
        scale = scale.to(tl.float32)
    else:
        bits = tl.load(rows + block * stride + scales_at + place, mask=known, other=0).to(tl.int32)
        if SCALE == "float8_e8m0fnu":
            # 2^-127 is no normal number.
            scale = tl.where(bits == 0, 0x400000, bits << 23).to(tl.float32, bitcast=True)
        else:
            scale = _e4m3(bits) * factor
    to = (block * 32 + output[:, None]) * inputs + column[None, :]
    tl.store(weight + to, (values * scale).to(tl.bfloat16), mask=(column < inputs)[None, :])

"""Kernels of Triton, in a module of their own because it imports Triton (triton_runtime.py).

Compact weights lie as in csrc/kernels/formats/compact.h: two rows of 64 weights are three parts of
64 bytes, the lower bytes of each row and a byte with the numbers of both.  Byte `b` of a part
belongs to output 16 · (b / 8 % 2) + 4 · (b / 16) + b / 2 % 4 of its block and to the row's input
b % 2.  Codes with scales lie as in int4.h, int8.h and fp8.h there, of which each has words of 16
bits, 32 for two inputs of a block's outputs, or for four in codes of four bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def expand_compact(rows, upper, weight, pairs, of_a_book, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Expand some pairs of rows of a block: [PAIRS, 3, 32] of 16 bits to [32, PAIRS] of 64.

    A word of 16 bits has two inputs of an output: of each part there is one, and together they are
    four weights that are neighbours.
    """
    block = tl.program_id(1).to(tl.int64)
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    word = tl.arange(0, 32)
    at = (block * pairs + pair[:, None]) * 96 + word[None, :]
    there = (pair < pairs)[:, None]
    left = tl.load(rows + at, mask=there, other=0).to(tl.int32)
    right = tl.load(rows + at + 32, mask=there, other=0).to(tl.int32)
    numbers = tl.load(rows + at + 64, mask=there, other=0).to(tl.int32)
    book = upper + block // of_a_book * 256
    first = tl.load(book + (numbers & 0xFF))
    second = tl.load(book + ((numbers >> 8) & 0xFF))
    left = (left & 0xFF) | ((left & 0xFF00) << 8) | (first & 0xFFFF) | (second << 16)
    right = (right & 0xFF) | ((right & 0xFF00) << 8)
    right = right | ((first >> 16) & 0xFFFF) | (second & -0x10000)
    values = (left.to(tl.int64) & 0xFFFFFFFF) | (right.to(tl.int64) << 32)
    output = block * 32 + 16 * (word // 4 % 2) + 4 * (word // 8) + word % 4
    tl.store(weight + output[None, :] * pairs + pair[:, None], values, mask=there)


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
def expand_scaled(  # type: ignore[no-untyped-def]
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


@triton.jit  # type: ignore[untyped-decorator]
def put_together(  # type: ignore[no-untyped-def]
    whole, whole_lse, part, part_lse, rows, whole_head, whole_token, part_head, part_token, size,
    HAS_ROWS: tl.constexpr, SIZE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Add a head of a token of `part` to that of `whole`, by their log-sum-exps."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    to = tl.load(rows + token).to(tl.int64) if HAS_ROWS else token
    old = tl.load(whole_lse + head * whole_head + to * whole_token)
    new = tl.load(part_lse + head * part_head + token * part_token)
    most = tl.maximum(old, new)
    sums = tl.exp(old - most) + tl.exp(new - most)
    both = most + tl.log(sums)
    at = tl.arange(0, SIZE)
    there = at < size
    into = whole + (to * heads + head) * size + at
    before = tl.load(into, mask=there).to(tl.float32)
    after = tl.load(part + (token * heads + head) * size + at, mask=there).to(tl.float32)
    values = before * tl.exp(old - both) + after * tl.exp(new - both)
    tl.store(into, values.to(tl.bfloat16), mask=there)
    tl.store(whole_lse + head * whole_head + to * whole_token, both)


@triton.jit  # type: ignore[untyped-decorator]
def rotate(  # type: ignore[no-untyped-def]
    heads, cos, sin, stride, count, size, half,
    HEADS: tl.constexpr, HALF: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Rotate all heads of a token in place."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    at = tl.arange(0, HALF)
    angles = at < half
    c = tl.load(cos + token * half + at, mask=angles, other=0)[None, :]
    s = tl.load(sin + token * half + at, mask=angles, other=0)[None, :]
    there = (head < count)[:, None] & angles[None, :]
    place = heads + token * stride + head[:, None] * size + at[None, :]
    left = tl.load(place, mask=there, other=0).to(tl.float32)
    right = tl.load(place + half, mask=there, other=0).to(tl.float32)
    tl.store(place, (left * c - right * s).to(tl.bfloat16), mask=there)
    tl.store(place + half, (right * c + left * s).to(tl.bfloat16), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def add_and_norm(  # type: ignore[no-untyped-def]
    y, total, weight, x, columns, epsilon,
    ADDS: tl.constexpr, PLUS_ONE: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Add a row of y to that of `total`; the root-mean-square norm of the sum into x."""
    row = tl.program_id(0).to(tl.int64) * columns
    at = tl.arange(0, COLUMNS)
    there = at < columns
    sums = tl.load(total + row + at, mask=there, other=0).to(tl.float32)
    if ADDS:
        sums += tl.load(y + row + at, mask=there, other=0).to(tl.float32)
        rounded = sums.to(tl.bfloat16)
        tl.store(total + row + at, rounded, mask=there)
        sums = rounded.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(sums * sums, axis=0) / columns + epsilon)
    factors = tl.load(weight + at, mask=there, other=0).to(tl.float32)
    if PLUS_ONE:
        factors += 1
    tl.store(x + row + at, (sums * scale * factors).to(tl.bfloat16), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def gated_silu(y, x, columns, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Some columns of a row of x: SiLU of the first half of a row of y times the second."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = at < columns
    gate = tl.load(y + 2 * row * columns + at, mask=there, other=0).to(tl.float32)
    up = tl.load(y + (2 * row + 1) * columns + at, mask=there, other=0).to(tl.float32)
    # Rounded in between, as two operators would.
    opened = (gate / (1 + tl.exp(-gate))).to(tl.bfloat16).to(tl.float32)
    tl.store(x + row * columns + at, (opened * up).to(tl.bfloat16), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def unpack(  # type: ignore[no-untyped-def]
    blocks, into, kind_stride, token_stride, head_stride, block, size, parts,
    ARE_TILES: tl.constexpr, TOKENS: tl.constexpr, SIZE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Write keys or values of some tokens of a head's block; layouts as in kv_layouts.py."""
    number, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    part, kind = tl.program_id(2) % parts, tl.program_id(2) // parts
    token = (part * TOKENS + tl.arange(0, TOKENS))[:, None]
    element = tl.arange(0, SIZE)[None, :]
    if ARE_TILES:
        key = ((token // 16 * (size // 2) + element // 2) * 16 + token % 16) * 2 + element % 2
        value = ((element // 16 * (block // 2) + token // 2) * 16 + element % 16) * 2 + token % 2
    else:
        key = element * block + token
        value = token * size + element
    at = tl.where(kind == 0, key, block * size + value)
    there = (token < block) & (element < size)
    own = blocks + (number * tl.num_programs(1) + head) * 2 * block * size
    found = tl.load(own + at, mask=there)
    to = into + kind.to(tl.int64) * kind_stride + head * head_stride
    tl.store(to + (number * block + token) * token_stride + element, found, mask=there)

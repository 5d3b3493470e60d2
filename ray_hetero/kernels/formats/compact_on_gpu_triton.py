"""The kernel of compact_on_gpu.py, a module of its own because it imports Triton.

The layout is that of csrc/kernels/formats/compact.h: two rows of 64 weights are three parts of 64
bytes, the lower bytes of each row and a byte with the numbers of both.  Byte `b` of a part belongs
to output 16 · (b / 8 % 2) + 4 · (b / 16) + b / 2 % 4 of its block and to the row's input b % 2.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def kernel(rows, upper, weight, pairs, of_a_book, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
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

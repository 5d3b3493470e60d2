"""The kernel of compact_on_gpu.py, a module of its own because it imports Triton.

The layout is that of csrc/kernels/formats/compact.h: two rows of 64 weights are three parts of 64
bytes, the lower bytes of each row and a byte with the numbers of both.  Byte `b` of a part belongs
to output 16 · (b / 8 % 2) + 4 · (b / 16) + b / 2 % 4 of its block and to the row's input b % 2.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def kernel(rows, upper, weight, inputs, pairs, of_a_book, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Expand some pairs of rows of a block: [PAIRS, 3, 64] bytes to [32, 4 · PAIRS] int16."""
    first = tl.program_id(0) * PAIRS
    block = tl.program_id(1).to(tl.int64)
    pair = first + tl.arange(0, PAIRS)
    at = (block * pairs + pair[:, None]) * 192 + tl.arange(0, 64)[None, :]
    there = (pair < pairs)[:, None]
    left = tl.load(rows + at, mask=there, other=0).to(tl.int32)
    right = tl.load(rows + at + 64, mask=there, other=0).to(tl.int32)
    numbers = tl.load(rows + at + 128, mask=there, other=0).to(tl.int32)
    both = tl.load(upper + block // of_a_book * 256 + numbers)
    both = both | left | (right << 16)
    values = tl.join((both & 0xFFFF).to(tl.int16), (both >> 16).to(tl.int16))
    # [pair, quarter, half, output, input, row] → [half, quarter, output, pair, row, input].
    values = tl.reshape(values, (PAIRS, 4, 2, 4, 2, 2))
    values = tl.permute(values, (2, 1, 3, 0, 5, 4))
    values = tl.reshape(values, (32, 4 * PAIRS))
    column = 4 * first + tl.arange(0, 4 * PAIRS)
    output = block * 32 + tl.arange(0, 32)
    tl.store(
        weight + output[:, None] * inputs + column[None, :], values, mask=(column < inputs)[None, :]
    )

"""The kernel of gpu_table.py, a module of its own because it imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def kernel(table, tokens, into, columns, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Copy some columns of a token's row, 16 bits each."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = at < columns
    token = tl.load(tokens + row)
    tl.store(
        into + row * columns + at, tl.load(table + token * columns + at, mask=there), mask=there
    )

"""Kernels of gpu_rows.py, a module of its own because it imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


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

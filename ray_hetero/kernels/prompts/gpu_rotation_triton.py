"""The kernel of gpu_rotation.py, a module of its own because it imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def kernel(  # type: ignore[no-untyped-def]
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

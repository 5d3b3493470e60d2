"""The kernel of gpu_attention.py, a module of its own because it imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


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

"""The kernel of gpu_unpacking.py, a module of its own because it imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def kernel(  # type: ignore[no-untyped-def]
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

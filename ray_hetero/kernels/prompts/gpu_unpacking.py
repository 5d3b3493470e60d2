"""Blocks of a KV cache on a GPU, unpacked token by token."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from ray_hetero.kernels.layers.kv_layouts import TILES, unpack_blocks

TOKENS = 32
"""Tokens that a program of the kernel writes."""


def unpack(blocks: torch.Tensor, isa: str, into: torch.Tensor, *, uses_triton: bool) -> None:
    """Write keys and values of blocks token by token, as `unpack_blocks` does.

    Args:
        blocks: [blocks, kv heads, tokens of a block, 2 · size], bf16, contiguous.
        isa: their layout.
        into: [2, blocks · tokens of a block, kv heads, size]; elements of a head are neighbours.
        uses_triton: whether one kernel does it, where two operators copy elements in the order in
            which they are written, which takes several times as long.

    """
    if not uses_triton:
        unpack_blocks(blocks, isa, into)
        return
    count, heads, block, both = blocks.shape
    size = both // 2
    assert blocks.is_contiguous()
    assert into.stride(3) == 1
    parts = -(-block // TOKENS)
    _kernel()[(count, heads, 2 * parts)](
        blocks, into, *into.stride()[:3], block, size, parts,
        isa == TILES, TOKENS, 1 << (size - 1).bit_length(),
    )  # fmt: skip


@functools.cache
def _kernel() -> Any:
    """The kernel, imported when it is first used: builds for CPUs alone have no Triton."""
    return importlib.import_module("ray_hetero.kernels.prompts.gpu_unpacking_triton").kernel

"""How keys and values lie in the blocks of vLLM's CPU attention, read on any device.

A layer's cache is [blocks, kv heads, tokens of a block, 2 · size]: keys of a head's block first,
then its values.  `isa` of vLLM's `cpu_attn_reshape_and_cache` says how either lies there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

TILES, ROWS = "amx", "vec"
"""Keys [block / 16][size / 2][16][2] and values [size / 16][block / 2][16][2]; keys [size][block]
and values [block][size]."""
TILE = 16


@dataclass(frozen=True)
class Caches:
    """Key and value caches of a step, from vLLM's forward context of each layer."""

    modules: tuple[Any, ...]
    """vLLM's attention of each layer."""
    caches: tuple[torch.Tensor, ...]
    slots: torch.Tensor
    """[tokens that the GPU computes], int64."""
    others: tuple[tuple[torch.Tensor, ...], ...] = ()
    """Caches of all layers of each other rank of the group whose prompts are computed here."""

    @property
    def by_layer(self) -> list[tuple[torch.Tensor, ...]]:
        """Caches of all ranks, by layer."""
        return list(zip(self.caches, *self.others, strict=True))

    @property
    def isa(self) -> str:
        """Layout of keys and values in a block."""
        return str(self.modules[0].isa)


def unpack_blocks(blocks: torch.Tensor, isa: str, into: torch.Tensor) -> None:
    """Write keys and values of blocks token by token.

    Args:
        blocks: [blocks, kv heads, tokens of a block, 2 · size].
        isa: their layout.
        into: [2, blocks · tokens of a block, kv heads, size].

    """
    count, heads, block, both = blocks.shape
    size = both // 2
    keys, values = blocks.reshape(count, heads, 2, block * size).unbind(2)
    if isa == ROWS:
        shape = (count, block, heads, size)
        into[0].view(shape).copy_(keys.unflatten(2, (size, block)).permute(0, 3, 1, 2))
        into[1].view(shape).copy_(values.unflatten(2, (block, size)).permute(0, 2, 1, 3))
        return
    assert isa == TILES, isa
    keys = keys.unflatten(2, (block // TILE, size // 2, TILE, 2)).permute(0, 2, 4, 1, 3, 5)
    into[0].view(count, block // TILE, TILE, heads, size // 2, 2).copy_(keys)
    values = values.unflatten(2, (size // TILE, block // 2, TILE, 2)).permute(0, 3, 5, 1, 2, 4)
    into[1].view(count, block // 2, 2, heads, size // TILE, TILE).copy_(values)


def can_be_copied(cache: torch.Tensor, isa: str) -> bool:
    """Whether a GPU can copy and read the blocks of a cache."""
    return (
        isa in {TILES, ROWS}
        and cache.dtype == torch.bfloat16
        and cache.ndim == 4
        and cache[0].is_contiguous()
    )

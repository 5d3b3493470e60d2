"""Weights of linear layers as a CPU rank's kernels read them: packed, or packed and compact.

A decode step reads all weights of a rank once, so it is the faster the fewer bytes they are.  The
upper byte of a bf16 holds its sign and most of its exponent, of which trained weights use few: a
compact weight holds codes of four bits in its place, and loses nothing
(csrc/kernels/formats/compact.h).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

BLOCK = 32
"""Outputs that are neighbours."""
PAIR_PARTS = 3
"""Of two compact rows: lower bytes of the first, of the second, numbers of upper bytes."""
ROW = 64
"""Weights of a row: two inputs of a block."""
MOST_EXCEPTIONS = 1 / 128
"""Share of weights that a compact one may hold beside its rows, in eight bytes each."""


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """W [N, K] of a linear layer."""

    data: torch.Tensor
    """[N, K], bf16, as `pack` packs it; compact: [N, 3 · K / 2], of bytes."""
    compact: Any = None
    """What belongs to a compact one beside its rows: `Compact` of the native module."""

    @property
    def shape(self) -> tuple[int, int]:
        """N, K."""
        outputs, width = self.data.shape
        return outputs, width if self.compact is None else width * 2 // PAIR_PARTS

    def packed(self) -> torch.Tensor:
        """[N, K], bf16; made anew if this is compact."""
        if self.compact is None:
            return self.data
        packed = torch.empty(self.shape, dtype=torch.bfloat16)
        self.compact.expand(self.data.data_ptr(), packed.data_ptr())
        return packed


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight in the layout [N / 32][K / 2][32][2] that CPU kernels multiply with.

    That is the layout of vLLM's `torch.ops._C.convert_weight_packed`, which only builds for AVX-512
    have.

    Args:
        weight: [N, K], bf16, N a multiple of 32, K of 2.

    Returns:
        [N, K], bf16, with memory of its own.

    """
    outputs, inputs = weight.shape
    blocks = weight.reshape(outputs // BLOCK, BLOCK, inputs // 2, 2).transpose(1, 2)
    return blocks.clone(memory_format=torch.contiguous_format).view(outputs, inputs)


def made_compact(packed: torch.Tensor, native: ModuleType) -> PackedWeight:
    """The same weight in 12 bits instead of 16, where its values allow that.

    Args:
        packed: [N, K], bf16, packed.
        native: the module of the kernels.

    """
    outputs, inputs = packed.shape
    rows = torch.empty((outputs, inputs * PAIR_PARTS // 2), dtype=torch.uint8)
    compact = native.Compact(packed.data_ptr(), outputs, inputs, rows.data_ptr())
    if compact.outliers_count > MOST_EXCEPTIONS * packed.numel():
        return PackedWeight(packed)
    return PackedWeight(rows, compact)

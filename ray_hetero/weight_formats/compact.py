"""Compact weights: bf16 in 12 bits in place of 16, without loss.

The upper byte of a bf16 holds its sign and most of its exponent, of which trained weights use few:
a compact weight holds codes of four bits in its place (csrc/kernels/formats/compact.h).  Weights
whose upper byte has no code are outliers, which a list holds; blocks with many of them stay packed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from ray_hetero.weight_formats.base import BLOCK, Expansion, HostWeight

if TYPE_CHECKING:
    import torch

PAIR_PARTS = 3
"""Parts of two compact rows: lower bytes of the first, of the second, codes of upper bytes."""
BF16_BYTES = 2
OUTLIER_BYTES = 10
"""An outlier on a GPU: its place and its value."""


@dataclass(frozen=True, eq=False)
class CompactWeight(HostWeight):
    """A weight whose `data` is [N, 3 · K / 2], bytes."""

    name: ClassVar[str] = "compact"
    read_share: ClassVar[float] = 0.75

    @classmethod
    def made(cls, packed: torch.Tensor, native: ModuleType) -> CompactWeight | None:
        """The same weight; None where too many of its blocks would stay packed."""
        import torch

        outputs, inputs = packed.shape
        rows = torch.empty((outputs, inputs * PAIR_PARTS // 2), dtype=torch.uint8)
        encoding = native.Compact.made(packed.data_ptr(), outputs, inputs, rows.data_ptr())
        return None if encoding is None else cls(rows, encoding)

    @property
    def gpu_bytes(self) -> int:
        """Outliers, and blocks that stay packed."""
        packed = len(self.encoding.packed_blocks) * BLOCK * self.shape[1]
        return OUTLIER_BYTES * int(self.encoding.outliers_count) + BF16_BYTES * packed

    def expansion(self, begin: int, end: int, device: torch.device) -> Expansion:
        """Codes are looked up, then outliers and blocks that stay packed written over."""
        import torch

        from ray_hetero.weight_formats.compact_on_gpu import choose_expand, upper_bytes

        inputs, first = self.shape[1], begin // BLOCK
        places, values = self.encoding.outliers(first, end // BLOCK)
        blocks = []
        for block in self.encoding.packed_blocks:
            if begin <= block * BLOCK < end:
                rows = torch.from_numpy(self.encoding.packed_rows(block).view("int16"))
                outputs = rows.view(inputs // 2, BLOCK, 2).transpose(0, 1).reshape(BLOCK, inputs)
                blocks.append((block - first, outputs.view(torch.bfloat16).to(device)))
        return _Expansion(
            inputs,
            choose_expand(device),
            upper_bytes(self.encoding.codebook).to(device),
            torch.from_numpy(places).to(device),
            torch.from_numpy(values.view("int16")).view(torch.bfloat16).to(device),
            tuple(blocks),
        )


@dataclass(frozen=True)
class _Expansion:
    inputs: int
    expand: Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], None]
    upper: torch.Tensor
    """As `compact_on_gpu.upper_bytes` has them."""
    places: torch.Tensor
    """Of outliers among the elements of the weight."""
    values: torch.Tensor
    """Theirs, bf16."""
    blocks: tuple[tuple[int, torch.Tensor], ...]
    """Those that stay packed: number, and [32, inputs], bf16."""

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor) -> None:
        self.expand(rows, self.upper, self.inputs, weight)
        weight.index_copy_(0, self.places, self.values)
        for block, outputs in self.blocks:
            weight.view(-1, BLOCK, self.inputs)[block].copy_(outputs)

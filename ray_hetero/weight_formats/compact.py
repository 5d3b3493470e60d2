"""Compact weights: bf16 in 12 bits in place of 16, without loss.

The upper byte of a bf16 holds its sign and most of its exponent, of which trained weights use few:
a compact weight holds codes of four bits in its place (csrc/kernels/formats/compact.h).  Weights
whose upper byte has no code are outliers, which a list holds; blocks with many of them stay packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from ray_hetero.weight_formats.base import BLOCK, Expansion, HostWeight

if TYPE_CHECKING:
    import torch

PAIR_PARTS = 3
"""Parts of two compact rows: lower bytes of the first, of the second, codes of upper bytes."""
ROW = 64
"""Weights of a row: two inputs of a block."""
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
            _upper_bytes(self.encoding.codebook).to(device),
            torch.from_numpy(places).to(device),
            torch.from_numpy(values.view("int16")).view(torch.bfloat16).to(device),
            tuple(blocks),
        )


@dataclass(frozen=True)
class _Expansion:
    inputs: int
    upper: torch.Tensor
    """[256], int32: for a byte of two codes the upper bytes, as int16 each, shifted to their
    place."""
    places: torch.Tensor
    """Of outliers among the elements of the weight."""
    values: torch.Tensor
    """Theirs, bf16."""
    blocks: tuple[tuple[int, torch.Tensor], ...]
    """Those that stay packed: number, and [32, inputs], bf16."""

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor) -> None:
        import torch

        parts = rows.view(-1, PAIR_PARTS, ROW)
        lower, codes = parts[:, :2], parts[:, 2]
        upper = self.upper[codes.int()].view(torch.int16).view(-1, ROW, 2)
        both = lower.transpose(1, 2) + upper
        # Bytes of a row lie as VPUNPCKLBW and VPUNPCKHBW take them: a quarter of the outputs of
        # each half after the other.
        packed = both.view(-1, self.inputs // 4, 4, 2, 4, 2, 2)
        order = (0, 3, 2, 4, 1, 6, 5)
        into = weight.view(torch.int16).view(-1, 2, 4, 4, self.inputs // 4, 2, 2)
        into.copy_(packed.permute(order))
        weight.index_copy_(0, self.places, self.values)
        for block, outputs in self.blocks:
            weight.view(-1, BLOCK, self.inputs)[block].copy_(outputs)


def _upper_bytes(codebook: list[int]) -> torch.Tensor:
    """`_Expansion.upper` of a codebook."""
    import torch

    shifted = torch.tensor(codebook, dtype=torch.uint8).view(torch.int8).to(torch.int16) << 8
    both = torch.arange(256)
    return torch.stack([shifted[both & 15], shifted[both >> 4]], dim=1).view(torch.int32).flatten()

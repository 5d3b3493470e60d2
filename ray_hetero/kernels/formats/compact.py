"""Compact weights: bf16 in 12 bits in place of 16, without loss.

The upper byte of a bf16 holds its sign and most of its exponent, of which trained weights use few:
a compact weight holds codes of four bits in its place (csrc/kernels/formats/compact.h).  Weights
whose upper byte has no code are outliers, which a list holds; blocks with many of them stay packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, Self

from ray_hetero.config import READ_SHARES
from ray_hetero.kernels.formats.base import BLOCK, HostWeight

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
    read_share: ClassVar[float] = READ_SHARES[name]

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

    def _packed_rows(self, block: int) -> torch.Tensor:
        """[32, inputs], bf16, of a block that stays packed."""
        import torch

        rows = torch.from_numpy(self.encoding.packed_rows(block).view("int16"))
        outputs = rows.view(self.shape[1] // 2, BLOCK, 2).transpose(0, 1)
        return outputs.reshape(BLOCK, -1).view(torch.bfloat16)

    @classmethod
    def tables(cls, weights: Sequence[Self]) -> dict[str, torch.Tensor]:
        """Codebooks; places of outliers and numbers of blocks that stay packed among all."""
        import torch

        (outputs, inputs), blocks = weights[0].shape, weights[0].shape[0] // BLOCK
        places, values, packed, rows = [], [], [], []
        for number, weight in enumerate(weights):
            at, value = weight.encoding.outliers(0, blocks)
            places.append(torch.from_numpy(at) + number * outputs * inputs)
            values.append(torch.from_numpy(value.view("int16")).view(torch.bfloat16))
            for block in weight.encoding.packed_blocks:
                packed.append(number * blocks + block)
                rows.append(weight._packed_rows(block))
        return {
            "books": torch.tensor(
                [weight.encoding.codebook for weight in weights], dtype=torch.uint8
            ),
            "places": torch.cat(places),
            "values": torch.cat(values),
            "packed": torch.tensor(packed, dtype=torch.int64),
            "rows": torch.stack(rows)
            if rows
            else torch.empty((0, BLOCK, inputs), dtype=torch.bfloat16),
        }

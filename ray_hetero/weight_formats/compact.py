"""Compact weights: bf16 in 12 bits in place of 16, without loss.

The upper byte of a bf16 holds its sign and most of its exponent, of which trained weights use few:
a compact weight holds codes of four bits in its place (csrc/kernels/formats/compact.h).  Weights
whose upper byte has no code are outliers, which a list holds.
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
MOST_OUTLIERS = 1 / 128
"""Largest share of weights that are outliers, eight bytes each."""
OUTLIER_BYTES = 10
"""An outlier on a GPU: its place and its value."""


@dataclass(frozen=True, eq=False)
class CompactWeight(HostWeight):
    """A weight whose `data` is [N, 3 · K / 2], bytes."""

    name: ClassVar[str] = "compact"
    read_share: ClassVar[float] = 0.75

    @classmethod
    def made(cls, packed: torch.Tensor, native: ModuleType) -> CompactWeight | None:
        """The same weight; None where too many of its values are outliers."""
        import torch

        outputs, inputs = packed.shape
        rows = torch.empty((outputs, inputs * PAIR_PARTS // 2), dtype=torch.uint8)
        encoding = native.Compact(packed.data_ptr(), outputs, inputs, rows.data_ptr())
        if encoding.outliers_count > MOST_OUTLIERS * packed.numel():
            return None
        return cls(rows, encoding)

    @property
    def gpu_bytes(self) -> int:
        """The outliers."""
        return OUTLIER_BYTES * int(self.encoding.outliers_count)

    def expansion(self, begin: int, end: int, device: torch.device) -> Expansion:
        """Codes are looked up, then outliers written over."""
        import torch

        from ray_hetero.weight_formats.compact_on_gpu import choose_expand, upper_bytes

        places, values = self.encoding.outliers(begin // BLOCK, end // BLOCK)
        return _Expansion(
            self.shape[1],
            choose_expand(device),
            upper_bytes(self.encoding.codebook).to(device),
            torch.from_numpy(places).to(device),
            torch.from_numpy(values).view(torch.bfloat16).to(device),
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

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor) -> None:
        self.expand(rows, self.upper, self.inputs, weight)
        weight.index_copy_(0, self.places, self.values)

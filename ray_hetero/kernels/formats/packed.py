"""Packed weights: bf16 as the kernels multiply it, see `pack`."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from ray_hetero.config import READ_SHARES
from ray_hetero.kernels.formats.base import HostWeight

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class PackedWeight(HostWeight):
    """A weight whose `data` is [N, K], bf16."""

    name: ClassVar[str] = "packed"
    read_share: ClassVar[float] = READ_SHARES[name]

    @classmethod
    def made(cls, packed: torch.Tensor, native: ModuleType) -> PackedWeight:
        """Any weight, without a copy."""
        return cls(packed, native.Packed(*packed.shape))

    def packed(self, native: ModuleType, level: Any) -> torch.Tensor:
        """The weight as it lies."""
        return self.data

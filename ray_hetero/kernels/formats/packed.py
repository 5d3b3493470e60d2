"""Packed weights: bf16 as the kernels multiply it, see `pack`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from ray_hetero.config import READ_SHARES
from ray_hetero.kernels.formats.base import (
    BLOCK,
    AsOneWeight,
    Expansion,
    HostWeight,
    StackExpansion,
)

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

    def expansion(self, begin: int, end: int, device: torch.device) -> Expansion:
        """Outputs of a block become rows."""
        return _Expansion(self.shape[1])

    @classmethod
    def part_expansion(
        cls,
        shape: tuple[int, int],
        facts: Mapping[str, Any],
        tables: Mapping[str, torch.Tensor],
        outputs: tuple[int, int],
        device: torch.device,
    ) -> Expansion:
        """Expansion that any outputs of a weight have."""
        return _Expansion(shape[1])

    @classmethod
    def stack_expansion(
        cls,
        shape: tuple[int, int],
        facts: Mapping[str, Any],
        tables: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> StackExpansion:
        """Expansion of weights as one weight of all their outputs."""
        return AsOneWeight(_Expansion(shape[1]))

    def packed(self, native: ModuleType, level: Any) -> torch.Tensor:
        """The weight as it lies."""
        return self.data


@dataclass(frozen=True)
class _Expansion:
    inputs: int

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor) -> None:
        import torch

        packed = rows.view(torch.bfloat16).view(-1, self.inputs // 2, BLOCK, 2)
        into = weight.view(-1, BLOCK, self.inputs // 2, 2)
        into.copy_(packed.permute(0, 2, 1, 3))

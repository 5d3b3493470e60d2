"""Base of all formats of weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    import torch

BLOCK = 32
"""Outputs that are neighbours in memory in every format."""


@dataclass(frozen=True, eq=False)
class HostWeight(ABC):
    """A weight [N, K] of a linear layer in host memory."""

    name: ClassVar[str]
    """The format's, as settings and messages have it."""
    read_share: ClassVar[float]
    """Bytes that a step reads, as a share of two bytes a weight."""

    data: torch.Tensor
    """[N, …], contiguous: the rows of any 32 outputs from a multiple of 32 on are neighbours."""
    encoding: Any
    """Native `Encoding` of the weight: what belongs to it beside its rows."""

    @classmethod
    @abstractmethod
    def made(cls, packed: torch.Tensor, native: ModuleType) -> Self | None:
        """A weight in this format; None where its values do not suit.

        Args:
            packed: [N, K], bf16, as `pack` packs it.
            native: the module of the kernels.

        """

    @property
    def shape(self) -> tuple[int, int]:
        """N, K."""
        outputs, inputs = self.encoding.shape
        return outputs, inputs

    @property
    def gpu_bytes(self) -> int:
        """Bytes of its `tables`."""
        return 0

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that weights of one stack share beside format and shape, as values of JSON."""
        return {}

    @classmethod
    def tables(cls, weights: Sequence[Self]) -> dict[str, torch.Tensor]:
        """Tensors that expanding weights takes beside their rows and facts."""
        return {}

    def packed(self, native: ModuleType, level: Any) -> torch.Tensor:
        """[N, K], bf16, as `pack` packs it; may be this weight's own memory.

        Args:
            native: the module of the kernels.
            level: which of its instruction sets expand.

        """
        import torch

        packed = torch.empty(self.shape, dtype=torch.bfloat16)
        native.expand(
            w=self.data.data_ptr(), encoding=self.encoding, packed=packed.data_ptr(), level=level
        )
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
    import torch

    outputs, inputs = weight.shape
    blocks = weight.reshape(outputs // BLOCK, BLOCK, inputs // 2, 2).transpose(1, 2)
    return blocks.clone(memory_format=torch.contiguous_format).view(outputs, inputs)

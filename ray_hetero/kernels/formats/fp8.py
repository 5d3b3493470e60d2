"""Floats of eight bits, E4M3, with scales for blocks, for outputs, or for all weights.

E4M3 is that of the OCP 8-bit Floating Point Specification (2023), which has NaN and no infinities.
Activations stay bf16, as with vLLM's own kernel for blocks on CPUs (`CPUFp8BlockScaledMMKernel`).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from ray_hetero.kernels.formats.base import BLOCK
from ray_hetero.kernels.formats.scaled import Codes, ScaledWeight, elements, from_elements

if TYPE_CHECKING:
    import torch

NAN = 0x7F
"""The code of NaN without its sign."""


@dataclass(frozen=True, eq=False)
class Fp8Weight(ScaledWeight):
    """Codes are the bits of `torch.float8_e4m3fn`; none of them is NaN."""

    name: ClassVar[str] = "fp8"
    read_share: ClassVar[float] = 0.5
    bits: ClassVar[int] = 8
    scale_types: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float8_e8m0fnu")
    no_number: ClassVar[int] = NAN

    @classmethod
    def values(cls, codes: torch.Tensor) -> torch.Tensor:
        """Values of codes as PyTorch has them."""
        import torch

        return codes.view(torch.float8_e4m3fn)

    @classmethod
    def rows(cls, codes: torch.Tensor) -> torch.Tensor:
        """See csrc/kernels/formats/fp8.h."""
        rows = elements(codes)
        blocks, pairs, _ = rows.shape
        return rows.view(blocks, pairs, 2, BLOCK).transpose(2, 3).reshape(blocks, -1)

    @classmethod
    def codes(cls, rows: torch.Tensor, inputs: int) -> torch.Tensor:
        """See csrc/kernels/formats/fp8.h."""
        halves = rows.reshape(len(rows), inputs // 2, BLOCK, 2).transpose(2, 3)
        return from_elements(halves.reshape(len(rows), inputs // 2, -1))

    @classmethod
    def _encoding(cls, codes: Codes, native: ModuleType) -> Any:
        outputs, inputs = codes.shape
        return native.Fp8(n=outputs, k=inputs, group=codes.group, scales=codes.layout.native)

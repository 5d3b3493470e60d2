"""Integers of eight bits: compressed-tensors W8A16 and the weights of W8A8.

Activations stay bf16 whatever the checkpoint quantises them to: a decode step is as fast, and
nearer to what the weights say.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from ray_hetero.kernels.formats.scaled import (
    LANES,
    Codes,
    ScaledWeight,
    elements,
    from_elements,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Int8Weight(ScaledWeight):
    """Codes 0 to 255; 128 stands for 0 unless there are zero points."""

    name: ClassVar[str] = "int8"
    read_share: ClassVar[float] = 0.5
    bits: ClassVar[int] = 8
    scale_types: ClassVar[tuple[str, ...]] = ("bfloat16", "float32")
    has_zeros: ClassVar[bool] = True

    @classmethod
    def zero(cls) -> int:
        """The middle of the codes."""
        return 128

    @classmethod
    def values(cls, codes: torch.Tensor) -> torch.Tensor:
        """The codes themselves."""
        return codes

    @classmethod
    def rows(cls, codes: torch.Tensor) -> torch.Tensor:
        """See csrc/kernels/formats/int8.h."""
        rows = elements(codes)
        blocks, pairs, _ = rows.shape
        return rows.view(blocks, pairs, 2, LANES, 2).transpose(2, 3).reshape(blocks, -1)

    @classmethod
    def codes(cls, rows: torch.Tensor, inputs: int) -> torch.Tensor:
        """See csrc/kernels/formats/int8.h."""
        lanes = rows.reshape(len(rows), inputs // 2, LANES, 2, 2).transpose(2, 3)
        return from_elements(lanes.reshape(len(rows), inputs // 2, -1))

    @classmethod
    def _encoding(cls, codes: Codes, native: ModuleType) -> Any:
        outputs, inputs = codes.shape
        return native.Int8(
            n=outputs, k=inputs, group=codes.group, scales=codes.layout.native,
            has_zeros=codes.zeros is not None,
        )  # fmt: skip

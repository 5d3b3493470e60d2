"""Integers of four bits in groups along K: compressed-tensors W4A16, GPTQ, AWQ.

The layouts of the checkpoints are those of the compressed-tensors library's `pack-quantized`, of
AutoGPTQ and of AutoAWQ; vLLM brings the last two into one order before kernels see them
(`AutoAWQMarlinLinearMethod.process_weights_after_loading`).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from ray_hetero.kernels.formats.scaled import Codes, ScaledWeight, from_nibble_rows, nibble_rows

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Int4Weight(ScaledWeight):
    """Codes 0 to 15; 8 stands for 0 unless there are zero points."""

    name: ClassVar[str] = "int4"
    read_share: ClassVar[float] = 0.25
    bits: ClassVar[int] = 4
    scale_types: ClassVar[tuple[str, ...]] = ("bfloat16", "float32")
    has_zeros: ClassVar[bool] = True

    @classmethod
    def zero(cls) -> int:
        """The middle of the codes."""
        return 8

    @classmethod
    def values(cls, codes: torch.Tensor) -> torch.Tensor:
        """The codes themselves."""
        return codes

    @classmethod
    def rows(cls, codes: torch.Tensor) -> torch.Tensor:
        """See csrc/kernels/formats/int4.h."""
        return nibble_rows(codes)

    @classmethod
    def codes(cls, rows: torch.Tensor, inputs: int) -> torch.Tensor:
        """See csrc/kernels/formats/int4.h."""
        return from_nibble_rows(rows, inputs)

    @classmethod
    def _encoding(cls, codes: Codes, native: ModuleType) -> Any:
        outputs, inputs = codes.shape
        return native.Int4(
            n=outputs, k=inputs, group=codes.group, scales=codes.layout.native,
            has_zeros=codes.zeros is not None,
        )  # fmt: skip

"""Integers of four and of eight bits with scales: compressed-tensors, GPTQ, AWQ.

The layouts of the checkpoints are those of the compressed-tensors library's `pack-quantized`, of
AutoGPTQ and of AutoAWQ; vLLM brings the last two into one order before kernels see them
(`AutoAWQMarlinLinearMethod.process_weights_after_loading`).

Activations stay bf16 whatever the checkpoint quantises them to, as those of W8A8: a decode step is
as fast, and nearer to what the weights say.
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
class IntegerWeight(ScaledWeight):
    """Codes from 0 on; the middle of them stands for 0 unless there are zero points."""

    scale_types: ClassVar[tuple[str, ...]] = ("bfloat16", "float32")
    has_zeros: ClassVar[bool] = True
    native_class: ClassVar[str]
    """The native module's class of the encoding."""

    @classmethod
    def zero(cls) -> int:
        """The middle of the codes."""
        return 1 << (cls.bits - 1)

    @classmethod
    def values(cls, codes: torch.Tensor) -> torch.Tensor:
        """The codes themselves."""
        return codes

    @classmethod
    def _encoding(cls, codes: Codes, native: ModuleType) -> Any:
        outputs, inputs = codes.shape
        return getattr(native, cls.native_class)(
            n=outputs, k=inputs, group=codes.group, scales=codes.layout.native,
            has_zeros=codes.zeros is not None,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Int4Weight(IntegerWeight):
    """W4A16, GPTQ and AWQ, in groups along K."""

    name: ClassVar[str] = "int4"
    read_share: ClassVar[float] = 0.25
    bits: ClassVar[int] = 4
    native_class: ClassVar[str] = "Int4"


@dataclass(frozen=True, eq=False)
class Int8Weight(IntegerWeight):
    """W8A16, and the weights of W8A8."""

    name: ClassVar[str] = "int8"
    read_share: ClassVar[float] = 0.5
    bits: ClassVar[int] = 8
    native_class: ClassVar[str] = "Int8"

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

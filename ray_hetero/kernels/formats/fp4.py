"""Floats of four bits, E2M1, in groups: MXFP4 and NVFP4.

MXFP4 is that of the OCP Microscaling Formats Specification v1.0 (2023): groups of 32 with E8M0
scales.  NVFP4 has groups of 16 with E4M3 scales and one factor for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from ray_hetero.kernels.formats.scaled import Codes, ScaledWeight

if TYPE_CHECKING:
    import torch

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7; the fourth bit is the sign."""


@dataclass(frozen=True, eq=False)
class Fp4Weight(ScaledWeight):
    """Codes 0 to 15."""

    name: ClassVar[str] = "fp4"
    read_share: ClassVar[float] = 0.25
    bits: ClassVar[int] = 4
    scale_types: ClassVar[tuple[str, ...]] = ("float8_e8m0fnu", "float8_e4m3fn")

    @classmethod
    def values(cls, codes: torch.Tensor) -> torch.Tensor:
        """Values of codes, taken from the table."""
        import torch

        table = torch.tensor((*VALUES, *(-value for value in VALUES)), device=codes.device)
        return table[codes.int()]

    @classmethod
    def _encoding(cls, codes: Codes, native: ModuleType) -> Any:
        outputs, inputs = codes.shape
        return native.Fp4(
            n=outputs, k=inputs, group=codes.group, scales=codes.layout.native, factor=codes.factor
        )

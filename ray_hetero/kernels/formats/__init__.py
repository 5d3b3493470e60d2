"""Formats of weights that a CPU rank's kernels read.

A decode step reads all weights of a rank once, so it is the faster the fewer bytes they are.  A
format is a class here, which says what it holds, and a file in csrc/kernels/formats/, which says
how the cores expand it.  How a GPU does is in offload/expand/.  Formats of weights in bf16 pack
these themselves (`HostWeight.made`); those of quantised checkpoints take the checkpoint's codes
(`ScaledWeight.stored`, scaled.py), which stored_codes.py reads from its tensors.

PyTorch is only imported where weights are at hand.  Planning knows the bytes that a format in bf16
reads from `config.READ_SHARES`.
"""

from __future__ import annotations

from ray_hetero.kernels.formats.base import HostWeight
from ray_hetero.kernels.formats.compact import CompactWeight
from ray_hetero.kernels.formats.fp4 import Fp4Weight
from ray_hetero.kernels.formats.fp8 import Fp8Weight
from ray_hetero.kernels.formats.integers import Int4Weight, Int8Weight
from ray_hetero.kernels.formats.packed import PackedWeight
from ray_hetero.kernels.formats.scaled import ScaledWeight

FORMATS: dict[str, type[HostWeight]] = {one.name: one for one in (PackedWeight, CompactWeight)}
"""Formats of weights in bf16 by name.  A new one is added here."""
SCALED_FORMATS: dict[str, type[ScaledWeight]] = {
    one.name: one for one in (Int4Weight, Int8Weight, Fp8Weight, Fp4Weight)
}
"""Formats of quantised checkpoints' weights by name.  A new one is added here."""

__all__ = [
    "FORMATS", "SCALED_FORMATS", "CompactWeight", "HostWeight", "PackedWeight", "ScaledWeight",
]  # fmt: skip

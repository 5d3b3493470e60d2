"""Formats of weights that a CPU rank's kernels read.

A decode step reads all weights of a rank once, so it is the faster the fewer bytes they are.  Each
format has a file here, which says what it holds and how a GPU expands it, and one in
csrc/kernels/formats/, which says how the processor does.  PyTorch is only imported where weights
are at hand: planning asks what a format reads.
"""

from __future__ import annotations

from ray_hetero.weight_formats.base import HostWeight
from ray_hetero.weight_formats.compact import CompactWeight
from ray_hetero.weight_formats.packed import PackedWeight

FORMATS: dict[str, type[HostWeight]] = {one.name: one for one in (PackedWeight, CompactWeight)}
"""All formats by name.  A new one is added here."""

__all__ = ["FORMATS", "CompactWeight", "HostWeight", "PackedWeight"]

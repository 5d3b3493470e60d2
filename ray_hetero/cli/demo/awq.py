"""Linear layers in integers of four bits, as AutoAWQ stores them: with zero points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray_hetero.cli.demo.integers import BITS, packed, rounded

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Number of the output, of eight neighbouring ones, at each place in a word, lowest bits first."""


def scheme(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of the checkpoint."""
    return {
        "quant_method": "awq", "bits": BITS, "group_size": group, "zero_point": True,
        "version": "gemm", "modules_to_not_convert": list(ignored),
    }  # fmt: skip


def tensors(weight: Any, group: int) -> dict[str, Any]:
    """Codes packed along the outputs, scales and zero points."""
    import torch

    made = rounded(weight, group, torch.float16, has_zeros=True)
    return {
        "qweight": packed(made.codes.t(), ORDER),
        "qzeros": packed(made.zeros.t(), ORDER),
        "scales": made.scales.t().to(torch.float16),
    }

"""Linear layers in integers of four bits, as AutoGPTQ stores them: symmetric, without act-order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray_hetero.cli.demo.integers import BITS, packed, rounded


def scheme(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of the checkpoint; output matrices are left out without a word."""
    return {
        "quant_method": "gptq", "bits": BITS, "group_size": group, "desc_act": False, "sym": True,
        "lm_head": False, "checkpoint_format": "gptq",
    }  # fmt: skip


def tensors(weight: Any, group: int) -> dict[str, Any]:
    """Codes packed along the inputs, scales, zero points less 1, and the inputs' groups."""
    import torch

    made = rounded(weight, group, torch.float16, has_zeros=False)
    return {
        "qweight": packed(made.codes).t(),
        "qzeros": packed(made.zeros.t() - 1),
        "scales": made.scales.t().to(torch.float16),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // group,
    }

"""Linear layers in integers alone, as compressed-tensors stores them (W4A16, W8A16)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray_hetero.cli.demo.integers import BITS, packed, rounded


def scheme(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of a symmetric checkpoint."""
    return _scheme(group, ignored, is_symmetric=True)


def scheme_with_zeros(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of a checkpoint with zero points."""
    return _scheme(group, ignored, is_symmetric=False)


def scheme_of_bytes(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of a symmetric checkpoint with eight bits a weight (W8A16)."""
    return _scheme(group, ignored, is_symmetric=True, bits=8)


def tensors(weight: Any, group: int) -> dict[str, Any]:
    """Packed codes and scales of a weight [N, K]."""
    return _tensors(weight, group, has_zeros=False)


def tensors_with_zeros(weight: Any, group: int) -> dict[str, Any]:
    """Packed codes, scales and zero points of a weight [N, K]."""
    return _tensors(weight, group, has_zeros=True)


def tensors_of_bytes(weight: Any, group: int) -> dict[str, Any]:
    """Packed codes of eight bits and scales of a weight [N, K]."""
    return _tensors(weight, group, has_zeros=False, bits=8)


def _scheme(
    group: int, ignored: Sequence[str], *, is_symmetric: bool, bits: int = BITS
) -> dict[str, Any]:
    weights = {
        "num_bits": bits, "type": "int", "symmetric": is_symmetric, "strategy": "group",
        "group_size": group, "dynamic": False,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": list(ignored),
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}
        },
    }


def _tensors(weight: Any, group: int, *, has_zeros: bool, bits: int = BITS) -> dict[str, Any]:
    import torch

    made = rounded(weight, group, torch.bfloat16, has_zeros=has_zeros, bits=bits)
    stored = {
        "weight_packed": packed(made.codes, bits=bits),
        "weight_scale": made.scales.to(torch.bfloat16),
        "weight_shape": torch.tensor(weight.shape),
    }
    if has_zeros:
        stored["weight_zero_point"] = packed(made.zeros.t(), bits=bits).t()
    return stored

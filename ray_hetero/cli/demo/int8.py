"""Linear layers in eight bits, as compressed-tensors stores them (W8A8).

Integer products on both kinds of device: of weights with one scale an output row and activations
with one scale a token, both symmetric.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LARGEST = 127
"""Largest value of a signed byte whose range is symmetric."""


def scheme(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of the checkpoint; there are no groups."""
    byte = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": list(ignored),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**byte, "strategy": "channel", "dynamic": False},
                "input_activations": {**byte, "strategy": "token", "dynamic": True},
            }
        },
    }


def tensors(weight: Any, group: int) -> dict[str, Any]:
    """Bytes and scales of a weight [N, K]."""
    import torch

    scale = weight.abs().amax(dim=1, keepdim=True) / LARGEST
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}

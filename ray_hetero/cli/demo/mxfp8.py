"""Linear layers in MXFP8, as compressed-tensors stores them: groups of 32 with powers of two.

Activations are of eight bits too (W8A8), where a device multiplies those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray_hetero.cli.demo.mxfp4 import BIAS, GROUP

LARGEST = 448.0
"""Largest value of a code."""


def scheme(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of the checkpoint, whose groups are those of the format."""
    floats = {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "group",
        "group_size": GROUP, "scale_dtype": "torch.uint8",
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized",
        "quantization_status": "compressed",
        "ignore": list(ignored),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**floats, "dynamic": False},
                "input_activations": {**floats, "dynamic": True},
            }
        },
    }


def tensors(weight: Any, group: int) -> dict[str, Any]:
    """Codes and exponents of a weight [N, K]."""
    import torch

    groups = weight.view(len(weight), -1, GROUP)
    exponents = torch.ceil(torch.log2(groups.abs().amax(-1) / LARGEST))
    scaled = groups / torch.exp2(exponents)[..., None]
    return {
        "weight": scaled.view(weight.shape).to(torch.float8_e4m3fn),
        "weight_scale": (exponents + BIAS).to(torch.uint8),
    }

"""Linear layers in MXFP4, as compressed-tensors stores them: groups of 32 with powers of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

GROUP = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7; the fourth bit is the sign."""
BIAS = 127
"""Bias of the exponents."""


def scheme(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of the checkpoint, whose groups are those of the format."""
    weights = {
        "num_bits": 4, "type": "float", "symmetric": True, "strategy": "group",
        "group_size": GROUP, "dynamic": False, "scale_dtype": "torch.uint8",
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "ignore": list(ignored),
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}
        },
    }


def tensors(weight: Any, group: int) -> dict[str, Any]:
    """Two codes a byte and exponents of a weight [N, K]."""
    import torch

    outputs, inputs = weight.shape
    groups = weight.view(outputs, inputs // GROUP, GROUP)
    exponents = torch.ceil(torch.log2(groups.abs().amax(-1) / VALUES[-1]))
    scaled = groups / torch.exp2(exponents)[..., None]
    codes = nearest_codes(scaled).view(outputs, inputs // 2, 2)
    return {
        "weight_packed": codes[..., 0] | codes[..., 1] << 4,
        "weight_scale": (exponents + BIAS).to(torch.uint8),
    }


def nearest_codes(scaled: Any) -> Any:
    """The codes whose values are nearest, uint8."""
    import torch

    nearest = (scaled.abs()[..., None] - torch.tensor(VALUES)).abs().argmin(-1)
    return (nearest | (scaled < 0) * 8).to(torch.uint8)

"""Linear layers in NVFP4, as compressed-tensors and ModelOpt store them.

Groups of 16 have scales in E4M3, and a layer one factor for these.  Activations are of four bits
too (W4A4), where a device multiplies those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray_hetero.cli.demo.mxfp4 import VALUES, nearest_codes

GROUP = 16
DIVISOR = 128.0
"""Divisor of the scales of a layer: the same for the parts of a fused layer, of which vLLM takes
one for all.  Weights may be up to 21; some of trained models are above 2."""


def scheme(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of the checkpoint, whose groups are those of the format."""
    floats = {
        "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group",
        "group_size": GROUP,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "ignore": list(ignored),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**floats, "dynamic": False},
                "input_activations": {**floats, "dynamic": "local"},
            }
        },
    }


def modelopt_scheme(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of the checkpoint as ModelOpt writes it."""
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": GROUP,
        "ignore": list(ignored),
    }


def tensors(weight: Any, group: int) -> dict[str, Any]:
    """Two codes a byte, scales of groups, and what divides these, of a weight [N, K]."""
    import torch

    outputs, inputs = weight.shape
    groups = weight.view(outputs, inputs // GROUP, GROUP)
    scales = (groups.abs().amax(-1) / VALUES[-1] * DIVISOR).to(torch.float8_e4m3fn)
    codes = nearest_codes(groups / (scales.float() / DIVISOR)[..., None]).view(outputs, -1, 2)
    return {
        "weight_packed": codes[..., 0] | codes[..., 1] << 4,
        "weight_scale": scales,
        "weight_global_scale": torch.tensor([DIVISOR]),
        "input_global_scale": torch.tensor([1.0]),
    }


def modelopt_tensors(weight: Any, group: int) -> dict[str, Any]:
    """The same by ModelOpt's names, with factors in the place of divisors."""
    stored = tensors(weight, group)
    return {
        "weight": stored["weight_packed"],
        "weight_scale": stored["weight_scale"],
        "weight_scale_2": 1 / stored["weight_global_scale"][0],
        "input_scale": 1 / stored["input_global_scale"][0],
    }

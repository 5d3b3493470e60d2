"""Linear layers in floats of eight bits: in blocks as DeepSeek and Qwen publish them, or by output.

Blocks are those of vLLM's method `fp8`, outputs those of compressed-tensors (W8A8, dynamic).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LARGEST = 448.0
"""Of E4M3."""


def block_scheme(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of a checkpoint in blocks of `group` outputs and inputs."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [group, group],
        "modules_to_not_convert": list(ignored),
    }


def block_tensors(weight: Any, group: int) -> dict[str, Any]:
    """Floats and the scales of blocks of a weight [N, K]; the last block may have fewer outputs."""
    import torch

    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % group))
    blocks = padded.view(-1, group, inputs // group, group)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / LARGEST
    stored = _floats(blocks / scale).view(padded.shape)[:outputs]
    return {"weight": stored, "weight_scale_inv": scale[:, 0, :, 0]}


def channel_scheme(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of a checkpoint with a scale an output; there are no groups."""
    byte = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
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


def channel_tensors(weight: Any, group: int) -> dict[str, Any]:
    """Floats and the scales of outputs of a weight [N, K]."""
    scale = weight.abs().amax(dim=1, keepdim=True) / LARGEST
    return {"weight": _floats(weight / scale), "weight_scale": scale}


def _floats(values: Any) -> Any:
    import torch

    return values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)

"""Linear layers in floats of eight bits: in blocks as DeepSeek and Qwen publish them, or otherwise.

Blocks, and one scale for a layer, are those of vLLM's method `fp8`; scales of outputs are those of
compressed-tensors, with activations of eight bits (W8A8, dynamic) or without (W8A16).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray_hetero.cli.demo.compressed_tensors import compressed_tensors

LARGEST = 448.0
"""Largest value of E4M3."""
BYTE = {"num_bits": 8, "type": "float", "symmetric": True}


def tensor_scheme(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of a checkpoint with one scale a layer; there are no groups."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": list(ignored),
    }


def block_scheme(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of a checkpoint in blocks of `group` outputs and inputs."""
    return {**tensor_scheme(group, ignored), "weight_block_size": [group, group]}


def block_tensors(weight: Any, group: int) -> dict[str, Any]:
    """Floats and the scales of blocks of a weight [N, K]; the last block may have fewer outputs."""
    import torch

    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % group))
    blocks = padded.view(-1, group, inputs // group, group)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / LARGEST
    stored = _floats(blocks / scale).view(padded.shape)[:outputs]
    return {"weight": stored, "weight_scale_inv": scale[:, 0, :, 0]}


def powers_scheme(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of a checkpoint in blocks whose scales are powers of two."""
    return {**block_scheme(group, ignored), "scale_fmt": "ue8m0"}


def powers_tensors(weight: Any, group: int) -> dict[str, Any]:
    """As `block_tensors`, with scales that are powers of two, of one byte each."""
    import torch

    scales = block_tensors(weight, group)["weight_scale_inv"]
    powers = torch.exp2(torch.ceil(torch.log2(scales)))
    of_weights = powers.repeat_interleave(group, 0)[: len(weight)].repeat_interleave(group, 1)
    return {
        "weight": _floats(weight / of_weights),
        "weight_scale_inv": powers.to(torch.float8_e8m0fnu),
    }


def channel_scheme(
    group: int, ignored: Sequence[str], *, has_activations: bool = True
) -> dict[str, Any]:
    """`quantization_config` of a checkpoint with a scale an output; there are no groups."""
    tokens = {**BYTE, "strategy": "token", "dynamic": True} if has_activations else None
    return compressed_tensors("float-quantized", ignored, {**BYTE, "strategy": "channel"}, tokens)


def channel_tensors(weight: Any, group: int) -> dict[str, Any]:
    """Floats and the scales of outputs of a weight [N, K]."""
    scale = weight.abs().amax(dim=1, keepdim=True) / LARGEST
    return {"weight": _floats(weight / scale), "weight_scale": scale}


def tensor_tensors(weight: Any, group: int) -> dict[str, Any]:
    """Floats and the one scale of a weight [N, K]."""
    scale = weight.abs().amax() / LARGEST
    return {"weight": _floats(weight / scale), "weight_scale": scale}


def _floats(values: Any) -> Any:
    import torch

    return values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)

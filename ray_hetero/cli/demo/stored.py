"""Formats that a demo model's linear layers can be stored in, as quantisation tools write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray_hetero.cli.demo import awq, fp8, gptq, int8, mxfp4, mxfp8, nvfp4, w4a16

UNQUANTISED = ("lm_head",)
"""Linear layers that stay as they are, as in most checkpoints."""
WEIGHT = ".weight"
ROUTERS = ("mlp.gate.weight", "block_sparse_moe.gate.weight")
"""Ends of the names of routers, which choose experts; they stay as they are too."""
LAST_OF_FUSED = "kv_a_proj_with_mqa"
"""A linear layer whose outputs need not fill their last block, as nothing lies behind them in
vLLM's layer: the latents of DeepSeek V3 are 4 and a half."""
MATRIX = 2
GROUPS = (128, 64, 32)
"""Inputs of a group, and outputs and inputs of a block: the first of these that all sizes fit."""

Tensors = dict[str, Any]
"""Tensors stored in place of a layer's weight, by the ends of their names."""


@dataclass(frozen=True)
class Stored:
    """A format."""

    scheme: Callable[[int, Sequence[str]], dict[str, Any]]
    """`quantization_config` of the checkpoint, given a group's size and which layers stay."""
    tensors: Callable[[Any, int], Tensors]
    """Given a weight [N, K] in float32 and a group's size."""


FORMATS = {
    "int8": Stored(int8.scheme, int8.tensors),
    "w8a16": Stored(w4a16.scheme_of_bytes, w4a16.tensors_of_bytes),
    "fp8": Stored(fp8.block_scheme, fp8.block_tensors),
    "fp8-channel": Stored(fp8.channel_scheme, fp8.channel_tensors),
    "fp8-tensor": Stored(fp8.tensor_scheme, fp8.tensor_tensors),
    "fp8-weight": Stored(fp8.weight_scheme, fp8.channel_tensors),
    "w4a16": Stored(w4a16.scheme, w4a16.tensors),
    "w4a16-zeros": Stored(w4a16.scheme_with_zeros, w4a16.tensors_with_zeros),
    "gptq": Stored(gptq.scheme, gptq.tensors),
    "awq": Stored(awq.scheme, awq.tensors),
    "mxfp4": Stored(mxfp4.scheme, mxfp4.tensors),
    "mxfp8": Stored(mxfp8.scheme, mxfp8.tensors),
    "nvfp4": Stored(nvfp4.scheme, nvfp4.tensors),
    "nvfp4-modelopt": Stored(nvfp4.modelopt_scheme, nvfp4.modelopt_tensors),
}
"""Formats by the name that `--stored` takes."""


def quantise(model: Any, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Store the linear layers of a `transformers` model in a format.

    Returns:
        `quantization_config` and the state dict.

    """
    from transformers.core_model_loading import revert_weight_conversion

    stored = FORMATS[name]
    # Checkpoints have a weight for each expert, models one for all.
    plain = revert_weight_conversion(model, model.state_dict())
    weights = {key.removesuffix(WEIGHT) for key, x in plain.items() if _is_quantised(key, x)}
    sizes = {
        size
        for layer in weights
        for size in plain[layer + WEIGHT].shape[layer.endswith(LAST_OF_FUSED) :]
    }
    group = next((group for group in GROUPS if all(size % group == 0 for size in sizes)), None)
    if group is None:
        group = GROUPS[-1]
    state: dict[str, Any] = {}
    for key, tensor in plain.items():
        layer = key.removesuffix(WEIGHT)
        if layer not in weights:
            state[key] = tensor
            continue
        for end, part in stored.tensors(tensor.float(), group).items():
            state[f"{layer}.{end}"] = part.contiguous()
    routers = (key.removesuffix(WEIGHT) for key in plain if key.endswith(ROUTERS))
    return stored.scheme(group, (*UNQUANTISED, *routers)), state


def _is_quantised(key: str, tensor: Any) -> bool:
    """Whether a tensor of a checkpoint is the weight of a linear layer that is quantised."""
    kept = (*(f"{name}{WEIGHT}" for name in UNQUANTISED), *ROUTERS)
    is_linear = tensor.ndim == MATRIX and key.endswith(WEIGHT) and "embed" not in key
    return is_linear and not key.endswith(kept)

"""Formats that a demo model's linear layers can be stored in, as quantisation tools write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray_hetero.cli.demo import fp8, integers, micro_floats

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
    group: int | None = None
    """Size of a group where the format has one; None takes the largest that fits."""


FORMATS = {
    "int8": Stored(integers.bytes_scheme, integers.bytes_tensors),
    "w8a16": Stored(
        partial(integers.packed_scheme, bits=8), partial(integers.packed_tensors, bits=8)
    ),
    "fp8": Stored(fp8.block_scheme, fp8.block_tensors),
    "fp8-channel": Stored(fp8.channel_scheme, fp8.channel_tensors),
    "fp8-tensor": Stored(fp8.tensor_scheme, fp8.tensor_tensors),
    "fp8-weight": Stored(partial(fp8.channel_scheme, has_activations=False), fp8.channel_tensors),
    "fp8-32": Stored(fp8.powers_scheme, fp8.powers_tensors, group=32),
    "w4a16": Stored(integers.packed_scheme, integers.packed_tensors),
    "w4a16-32": Stored(integers.packed_scheme, integers.packed_tensors, group=32),
    "w4a16-zeros": Stored(
        partial(integers.packed_scheme, has_zeros=True),
        partial(integers.packed_tensors, has_zeros=True),
    ),
    "gptq": Stored(integers.gptq_scheme, integers.gptq_tensors),
    "awq": Stored(integers.awq_scheme, integers.awq_tensors),
    "mxfp4": Stored(micro_floats.mxfp4_scheme, micro_floats.mxfp4_tensors),
    "mxfp8": Stored(micro_floats.mxfp8_scheme, micro_floats.mxfp8_tensors),
    "nvfp4": Stored(micro_floats.nvfp4_scheme, micro_floats.nvfp4_tensors),
    "nvfp4-modelopt": Stored(micro_floats.modelopt_scheme, micro_floats.modelopt_tensors),
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
    fitting = (group for group in GROUPS if all(size % group == 0 for size in sizes))
    group = stored.group or next(fitting, GROUPS[-1])
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

"""Formats that a demo model's linear layers can be stored in, as quantisation tools write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray_hetero.cli.demo import awq, fp8, gptq, int8, mxfp4, w4a16

UNQUANTISED = ("lm_head",)
"""Linear layers that stay as they are, as in most checkpoints."""
GROUPS = (128, 64, 32)
"""Inputs of a group, and outputs and inputs of a block: the first of these that all sizes fit."""

Tensors = dict[str, Any]
"""What is stored in place of a layer's weight, by the ends of their names."""


@dataclass(frozen=True)
class Stored:
    """A format."""

    scheme: Callable[[int, Sequence[str]], dict[str, Any]]
    """`quantization_config` of the checkpoint, given a group's size and which layers stay."""
    tensors: Callable[[Any, int], Tensors]
    """Given a weight [N, K] in float32 and a group's size."""


FORMATS = {
    "int8": Stored(int8.scheme, int8.tensors),
    "fp8": Stored(fp8.block_scheme, fp8.block_tensors),
    "fp8-channel": Stored(fp8.channel_scheme, fp8.channel_tensors),
    "w4a16": Stored(w4a16.scheme, w4a16.tensors),
    "w4a16-zeros": Stored(w4a16.scheme_with_zeros, w4a16.tensors_with_zeros),
    "gptq": Stored(gptq.scheme, gptq.tensors),
    "awq": Stored(awq.scheme, awq.tensors),
    "mxfp4": Stored(mxfp4.scheme, mxfp4.tensors),
}
"""By the name that `--stored` takes."""


def quantise(model: Any, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Store the linear layers of a `transformers` model in a format.

    Returns:
        `quantization_config` and the state dict.

    """
    import torch

    stored = FORMATS[name]
    layers = {
        module_name: module
        for module_name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module_name not in UNQUANTISED
    }
    sizes = {size for module in layers.values() for size in module.weight.shape}
    group = next((group for group in GROUPS if all(size % group == 0 for size in sizes)), None)
    if group is None:
        group = GROUPS[-1]
    state: dict[str, Any] = {}
    for key, tensor in model.state_dict().items():
        layer, _, end = key.rpartition(".")
        if layer not in layers or end != "weight":
            state[key] = tensor
            continue
        for end, part in stored.tensors(tensor.float(), group).items():
            state[f"{layer}.{end}"] = part.contiguous()
    return stored.scheme(group, UNQUANTISED), state

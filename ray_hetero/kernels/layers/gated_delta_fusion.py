"""The layers with a Gated DeltaNet that become one operator with loaded weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from vllm.model_executor.layers.activation import SiluAndMul

from ray_hetero.compat.models.gated_delta import convolution, weight_of, why_unknown
from ray_hetero.compat.models.lora import base_layer
from ray_hetero.kernels.formats import PackedWeight
from ray_hetero.kernels.formats.base import BLOCK, pack
from ray_hetero.kernels.layers.attention import as_norm
from ray_hetero.kernels.layers.gated_delta_layers import (
    GatedDeltaLayer,
    GatedDeltaParts,
    GatedDeltaShape,
)
from ray_hetero.kernels.layers.layer_parts import Linear, PostAttention
from ray_hetero.kernels.layers.structures import GatedDeltaModules, gated_delta_modules
from ray_hetero.kernels.linear.rank_sums import why_not_added
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear

KEY_MULTIPLE, VALUE_MULTIPLE = 16, 32
"""Divisors of the elements of a key and of a value: what csrc/kernels/gated_delta.h takes."""


def gated_delta_layer_of(
    decoder: Any, layer: Any, linears: Mapping[nn.Module, Linear], kernel: StreamingLinear
) -> tuple[GatedDeltaLayer, Any] | str | None:
    """Layer with a Gated DeltaNet, as a `LayerKind`; it computes an MLP too, but no experts."""
    modules = gated_delta_modules(decoder, layer)
    if modules is None:
        return None
    if kernel.dtype != torch.bfloat16:
        return "a Gated DeltaNet is computed here in bfloat16 only (--dtype bfloat16)"
    if getattr(decoder, "aux_hidden_state_layers", ()):
        return "a drafter reads hidden states between layers"
    delta = modules.delta
    if why := _why_unsuited(modules, linears) or why_not_added(
        (*modules.linears, delta.in_proj_ba), modules.added, kernel.sums
    ):
        return why
    taps = convolution(delta)
    if taps.dtype != torch.bfloat16:
        return "the convolution is of another type than the linear layers"
    shape = GatedDeltaShape(
        key_heads=delta.num_k_heads // delta.tp_size,
        value_heads=delta.num_v_heads // delta.tp_size,
        key=int(delta.head_k_dim), value=int(delta.head_v_dim),
        is_by_key_head=bool(delta.gqa_interleaved_layout),
    )  # fmt: skip
    if shape.key % KEY_MULTIPLE or shape.value % VALUE_MULTIPLE:
        return (
            f"heads have keys of {shape.key} and values of {shape.value} elements, expected "
            f"multiples of {KEY_MULTIPLE} and {VALUE_MULTIPLE}"
        )
    input_norm, norm = as_norm(modules.input_norm), as_norm(modules.norm)
    assert input_norm is not None
    assert norm is not None
    queries, *others = (linears[one] for one in modules.linears)
    if kernel.sums is not None and not kernel.sums.is_first:
        others = [
            replace(linear, bias=None) if module in modules.added else linear
            for linear, module in zip(others, modules.linears[1:], strict=True)
        ]
    output, *mlp = others
    behind = PostAttention(output, norm)
    if mlp:
        behind = replace(behind, gate_up=mlp[0], down=mlp[1])
    parts = GatedDeltaParts(
        shape=shape, norm=input_norm, input=queries, gates=_gates(delta, linears, kernel),
        taps=taps.T.contiguous(), rates=-torch.exp(delta.A_log.data.float()),
        rate_bias=delta.dt_bias.data.float().contiguous(),
        head_norm=delta.norm.weight.data.float().contiguous(), epsilon=float(delta.norm.eps),
        is_sigmoid=delta.norm.activation == "sigmoid", behind=behind,
    )  # fmt: skip
    made = GatedDeltaLayer(parts, delta, kernel, modules.mlp if mlp else None)
    return made, None if mlp else modules.mlp


def _gates(delta: Any, linears: Mapping[nn.Module, Linear], kernel: StreamingLinear) -> Linear:
    """The product for write gates and decays, with rows of zeros up to a whole block."""
    found = linears.get(delta.in_proj_ba)
    if found is not None:
        return found
    weight = weight_of(delta.in_proj_ba, kernel.dtype)
    padded = functional.pad(weight, (0, 0, 0, -len(weight) % BLOCK))
    return Linear(PackedWeight.made(pack(padded), kernel.native), None)


def _why_unsuited(modules: GatedDeltaModules, linears: Mapping[nn.Module, Linear]) -> str:
    """Why the products, norms and the state of a layer cannot be computed here; or ""."""
    if why := why_unknown(modules.delta):
        return why
    if any(base_layer(one) is not one for one in (*modules.linears, modules.delta.in_proj_ba)):
        return "a Gated DeltaNet with adapters is left to vLLM"
    if any(one not in linears for one in modules.linears):
        return "vLLM's own kernels compute linear layers of it"
    if modules.is_plain_mlp and type(modules.mlp.act_fn) is not SiluAndMul:
        return f"the activation is another one ({type(modules.mlp.act_fn).__name__})"
    for norm in (modules.input_norm, modules.norm):
        if as_norm(norm) is None:
            return f"a norm is another one ({type(norm).__name__})"
    return ""

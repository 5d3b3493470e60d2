"""The layers with multi-head latent attention that become one operator with loaded weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import (
    DeepseekScalingRotaryEmbedding,
)

from ray_hetero.compat.models.latent_attention import why_unknown
from ray_hetero.compat.models.lora import base_layer
from ray_hetero.kernels.formats.base import BLOCK
from ray_hetero.kernels.layers import latent_weights
from ray_hetero.kernels.layers.attention import as_norm, is_neox
from ray_hetero.kernels.layers.latent_layers import LatentLayer, LatentParts, LatentShape
from ray_hetero.kernels.layers.layer_parts import Linear, PostAttention
from ray_hetero.kernels.layers.structures import LatentModules, latent_modules
from ray_hetero.kernels.linear.rank_sums import why_not_added
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear

ROTATED_MULTIPLE = 16
"""Divisor of the number of elements of a rotated part: a vector's elements."""
ROTATIONS = (RotaryEmbedding.forward_native, DeepseekScalingRotaryEmbedding.forward_native)
"""Rotations by one table of cosines and sines, which may be scaled."""


def latent_layer_of(
    decoder: Any, layer: Any, linears: Mapping[nn.Module, Linear], kernel: StreamingLinear
) -> tuple[LatentLayer, Any] | str | None:
    """Layer with latent attention, and vLLM's module of the operations that follow it.

    Args:
        decoder: vLLM's model.
        layer: one of its layers.
        linears: linear layers that the kernel computes, by vLLM's module.
        kernel: what computes them.

    Returns:
        Why it is left to vLLM, if it is; None if the layer is of another kind.

    """
    modules = latent_modules(decoder, layer)
    if modules is None:
        return None
    if kernel.dtype != torch.bfloat16:
        return "latent attention is computed here in bfloat16 only (--dtype bfloat16)"
    if getattr(decoder, "aux_hidden_state_layers", ()):
        return "a drafter reads hidden states between layers"
    if why := _why_unsuited(modules, linears) or why_not_added(
        (modules.queries, modules.output), (modules.output,), kernel.sums
    ):
        return why
    attend, wrapper = modules.attend, modules.wrapper
    shape = LatentShape(
        heads=int(wrapper.num_heads), latent=int(attend.kv_lora_rank),
        rotated=int(attend.qk_rope_head_dim), plain=int(attend.qk_nope_head_dim),
        value=int(attend.v_head_dim),
    )  # fmt: skip
    weights = latent_weights.made(attend, shape, kernel)
    if isinstance(weights, str):
        return weights
    down, queries, output = (linears[one] for one in modules.linears)
    own_norm, latent_norm, norm = (
        as_norm(one) for one in (modules.input_norm, modules.latent_norm, modules.norm)
    )
    assert own_norm is not None
    assert latent_norm is not None
    assert norm is not None
    if kernel.sums is not None and not kernel.sums.is_first:
        output = replace(output, bias=None)
    parts = LatentParts(
        shape=shape, norm=own_norm, down=down, query_norm=as_norm(modules.query_norm),
        queries=queries, latent_norm=latent_norm,
        cos_sin=modules.rotary.cos_sin_cache.to(torch.bfloat16).contiguous(),
        is_interleaved=not is_neox(modules.rotary), to_latent=weights[0], from_latent=weights[1],
        scale=float(attend.impl.scale), behind=PostAttention(output, norm),
    )  # fmt: skip
    return LatentLayer(parts, attend.layer_name, modules.attention, kernel), modules.mlp


def _why_unsuited(modules: LatentModules, linears: Mapping[nn.Module, Linear]) -> str:
    """Why the products, norms and the attention of a layer cannot be computed here; or ""."""
    if why := why_unknown(modules.wrapper):
        return why
    if any(base_layer(one) is not one for one in modules.linears):
        return "latent attention with adapters is left to vLLM"
    if any(one not in linears for one in modules.linears):
        return "vLLM's own kernels compute linear layers of it"
    norms = (modules.input_norm, modules.latent_norm, modules.norm)
    query_norms = () if modules.query_norm is None else (modules.query_norm,)
    for norm in (*norms, *query_norms):
        if as_norm(norm) is None:
            return f"a norm is another one ({type(norm).__name__})"
    attend, rotary = modules.attend, modules.rotary
    rotated = attend.qk_rope_head_dim
    if (
        getattr(type(rotary), "forward_native", None) not in ROTATIONS
        or rotary.rotary_dim != rotated
        or rotary.cos_sin_cache.shape[1] != rotated
    ):
        return f"positions are another rotation ({type(rotary).__name__})"
    sizes = (attend.kv_lora_rank, attend.qk_nope_head_dim, attend.v_head_dim,
             attend.kv_lora_rank + rotated)  # fmt: skip
    if any(size % BLOCK for size in sizes) or rotated % ROTATED_MULTIPLE:
        return f"latents and parts of heads have {sizes} elements, expected multiples of {BLOCK}"
    return ""

"""The layers with multi-head latent attention that become one operator with loaded weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import (
    DeepseekScalingRotaryEmbedding,
)

from ray_hetero.compat.models.latent_attention import head_weights, why_unknown
from ray_hetero.compat.models.lora import base_layer
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.formats import HostWeight, PackedWeight
from ray_hetero.kernels.formats.base import BLOCK, pack
from ray_hetero.kernels.formats.fp8 import Fp8Weight
from ray_hetero.kernels.formats.scaled import Codes
from ray_hetero.kernels.layers.attention import as_norm, is_neox
from ray_hetero.kernels.layers.latent_layers import LatentLayer, LatentParts, LatentShape
from ray_hetero.kernels.layers.layer_parts import Linear, PostAttention
from ray_hetero.kernels.layers.structures import LatentModules, latent_modules
from ray_hetero.kernels.linear.quantised_linear import BlockFloats
from ray_hetero.kernels.linear.rank_sums import why_not_added
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear

ROTATED_MULTIPLE = 16
"""Divisor of the number of elements of a rotated part: a vector's elements."""
ROTATIONS = (RotaryEmbedding.forward_native, DeepseekScalingRotaryEmbedding.forward_native)
"""Rotations by one table of cosines and sines, which may be scaled."""


def latent_layer_of(
    decoder: Any, layer: Any, linears: Mapping[nn.Module, Linear], kernel: StreamingLinear
) -> tuple[LatentLayer, Any] | str | None:
    """Layer with latent attention up to its MLP or its experts, as a `LayerKind`."""
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
    weights = head_weights_of(attend, shape, kernel)
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


HeadWeights = tuple[HostWeight, HostWeight]
"""[heads · latent, plain] and [heads · value, latent]."""


def head_weights_of(attend: Any, shape: LatentShape, kernel: StreamingLinear) -> HeadWeights | str:
    """Weights that expand latents to keys and values; or why they cannot be read here.

    `kv_b_proj` [heads · (plain + value), latent] would make keys and values of latents.  A decode
    step multiplies queries with a head's keys transposed, and what it has attended to with its
    values: two weights, which a step reads whole.

    Of a checkpoint in FP8 with scales for blocks, as DeepSeek V3 and R1 and Kimi K2 are published,
    both are held as the checkpoint's own floats, transposed with their scales: 17 MB for each layer
    of DeepSeek V3, where bf16 would take 34 MB, three in a hundred of the 580 MB that its attention
    and nine experts read for one token.  Prompts, which vLLM computes, have them in bf16
    (quantised_linear.py).  In other formats they are what vLLM has made of `kv_b_proj`, in bf16.

    Args:
        attend: vLLM's `MLAAttention`, whose weights are loaded.
        shape: of its heads.
        kernel: what computes the products.

    Raises:
        UnsupportedError: weights or scales that the kernels do not compute, such as NaN.

    """
    layer = base_layer(attend.kv_b_proj)
    blocks: BlockFloats | None = getattr(layer, "checkpoint_blocks", None)
    if blocks is None:
        return _of_vllm(attend, shape, kernel)
    rows = shape.heads * (shape.plain + shape.value)
    if tuple(blocks.weight.shape) != (rows, shape.latent):
        return "kv_b_proj has other sizes than its heads suggest"
    try:
        keys, values = (
            Fp8Weight.stored(codes, kernel.native) for codes in head_codes(blocks, shape)
        )
    except UnsupportedError as error:
        raise UnsupportedError(f"{attend.layer_name}, kv_b_proj: {error}") from None
    # Nobody else needs the checkpoint's tensors.
    del layer.checkpoint_blocks
    return keys, values


def head_codes(blocks: BlockFloats, shape: LatentShape) -> tuple[Codes, Codes]:
    """Codes of the weights that expand latents, as `HeadWeights`, from `kv_b_proj` in blocks."""
    heads, latent, plain, value = shape.heads, shape.latent, shape.plain, shape.value
    of_head = plain + value
    scales = blocks.scales
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    # A block may have rows of several heads, and a head rows of several blocks.
    block_of_row = torch.arange(heads * of_head) // blocks.rows
    by_row = scales.float()[block_of_row].view(heads, of_head, -1)
    codes = blocks.weight.contiguous().view(torch.uint8).view(heads, of_head, latent)

    # The scales of a row's blocks are those of outputs now.
    group = math.gcd(blocks.rows, of_head)
    same = BLOCK if blocks.columns % BLOCK == 0 else 1
    of_outputs = by_row[:, :plain:group].transpose(1, 2)
    of_outputs = of_outputs.repeat_interleave(blocks.columns // same, 1)[:, : latent // same]
    keys = Codes(
        codes[:, :plain].transpose(1, 2).reshape(heads * latent, plain),
        of_outputs.reshape(heads * latent // same, -1),
        group,
    )
    same = BLOCK if blocks.rows % BLOCK == 0 else 1
    of_values = by_row[:, plain::same]
    values = Codes(
        codes[:, plain:].reshape(heads * value, latent),
        of_values.reshape(heads * value // same, -1),
        blocks.columns,
    )
    return keys, values


def _of_vllm(attend: Any, shape: LatentShape, kernel: StreamingLinear) -> HeadWeights | str:
    keys, values, is_packed = head_weights(attend)
    expected = ((shape.heads, shape.latent, shape.plain), (shape.heads, shape.value, shape.latent))
    if (
        any(one is None or one.dtype != torch.bfloat16 for one in (keys, values))
        or (tuple(keys.shape), tuple(values.shape)) != expected
    ):
        return "vLLM holds the matrices of its heads (kv_b_proj) quantised, or in another way"
    keys, values = (one.reshape(-1, one.shape[2]) for one in (keys, values))
    if not is_packed:
        keys, values = pack(keys), pack(values)
    return PackedWeight.made(keys, kernel.native), PackedWeight.made(values, kernel.native)

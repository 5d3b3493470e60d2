"""Weights by which the heads of multi-head latent attention expand latents."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ray_hetero.compat.models.latent_attention import head_weights
from ray_hetero.compat.models.lora import base_layer
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.formats import HostWeight, PackedWeight
from ray_hetero.kernels.formats.base import BLOCK, pack
from ray_hetero.kernels.formats.fp8 import Fp8Weight
from ray_hetero.kernels.formats.scaled import Codes
from ray_hetero.kernels.linear.quantised_linear import BlockFloats
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear


@dataclass(frozen=True)
class LatentShape:
    """Heads of a multi-head latent attention, and elements of their parts."""

    heads: int
    latent: int
    """Elements cached of a token, which are read as keys and as values."""
    rotated: int
    """Elements of keys and queries that are rotated."""
    plain: int
    """The other part of a head's queries."""
    value: int

    @property
    def cached(self) -> int:
        """Elements of a token in the cache."""
        return self.latent + self.rotated


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

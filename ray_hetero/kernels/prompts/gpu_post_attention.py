"""What a decoder layer computes behind its attention, on the GPU that computes prompts.

Products are those of gpu_prefill.py; norms and gates between them are one kernel each where there
is one (gpu_rows.py), else operators over some tokens at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ray_hetero.kernels.prompts import gpu_rows
from ray_hetero.kernels.prompts.gpu_rows import chunks
from ray_hetero.kernels.prompts.link_reader import current

if TYPE_CHECKING:
    from ray_hetero.kernels.layers.layer_parts import Norm, PostAttention
    from ray_hetero.kernels.prompts.gpu_prefill import GpuPrefill


def post_attention(
    gpu: GpuPrefill, parts: PostAttention, attended: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `PostAttentionBlock` computes; shapes as there, all in host memory."""
    gpu.begin(len(attended))
    with current(gpu.computing):
        x, total = gpu.memory.stage(attended, residual, slice(None))
        assert total is not None
        x, total = gpu.memory.sent_to_multiply(x, total)
        y = behind(gpu, parts, x, total)
        if parts.next is not None:
            x = add_and_norm(gpu, y, total, parts.next.norm)
            y = gpu.product(x, parts.next.qkv)
        y_host, total_host = gpu.received(y, total)
    return y_host, total_host


def behind(
    gpu: GpuPrefill, parts: PostAttention, attended: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """What a layer computes behind its attention: [M, N], which is to be added to `total`.

    Without an MLP: what its norm gives.

    Args:
        gpu: has the layer's weights.
        parts: of the layer; what comes next is left out.
        attended: [M, K].
        total: [M, N], the residual, to which the attention is added.

    """
    y = gpu.product(attended, parts.output)
    if parts.is_parallel:
        x = add_and_norm(gpu, None, total, parts.norm)
        total += y if parts.multiplier == 1 else y * parts.multiplier
    else:
        _prepare(gpu, y, parts.output_norm, parts.multiplier)
        x = add_and_norm(gpu, y, total, parts.norm)
    if parts.gate_up is None or parts.down is None:
        return x
    y = gpu.product(activated(gpu, parts, gpu.product(x, parts.gate_up)), parts.down)
    _prepare(gpu, y, parts.down_norm, parts.multiplier)
    return y


def _prepare(gpu: GpuPrefill, y: torch.Tensor, own: Norm | None, multiplier: float) -> None:
    """Make of a product [M, N] what is added to the residual, in place."""
    if own is not None:
        for rows in chunks(len(y)):
            y[rows] = norm(gpu, y[rows], own)
    if multiplier != 1:
        y *= multiplier


def norm(gpu: GpuPrefill, x: torch.Tensor, how: Norm) -> torch.Tensor:
    """The norm of x's last dimension, bf16."""
    bias = None if how.bias is None else gpu.constant(how.bias)
    return how(x, gpu.constant(how.weight), bias)


def add_and_norm(
    gpu: GpuPrefill, y: torch.Tensor | None, total: torch.Tensor, how: Norm
) -> torch.Tensor:
    """Add y to `total`; the norm of the sum, [M, N], in memory that the next one overwrites.

    Args:
        gpu: where both are.
        y: [M, N]; None adds nothing.
        total: [M, N].
        how: the norm of rows.

    """
    x = gpu.memory.to_multiply(*total.shape)
    if gpu.uses_triton and gpu_rows.has_norm(how, total.shape[1]):
        gpu_rows.add_and_norm(y, total, how, gpu.constant(how.weight), x)
        return x
    for rows in chunks(len(total)):
        if y is not None:
            total[rows] += y[rows]
        x[rows] = norm(gpu, total[rows], how)
    return x


def activated(gpu: GpuPrefill, parts: PostAttention, y: torch.Tensor) -> torch.Tensor:
    """What an MLP's `down` multiplies, [M, K], in the memory of norms.

    Args:
        gpu: where it is.
        parts: of the layer.
        y: what `gate_up` gave, [M, K or 2 · K].

    """
    tokens = y.shape[0]
    inputs = y.shape[1] // 2 if parts.is_gated else y.shape[1]
    x = gpu.memory.to_multiply(tokens, inputs)
    if gpu.uses_triton and gpu_rows.has_activation(parts):
        gpu_rows.activate(y, x)
        return x
    for rows in chunks(tokens):
        x[rows] = parts.activated(y[rows])
    return x

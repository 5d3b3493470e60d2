"""Operations of a decoder layer after its attention, on the GPU that computes prompts.

Products are those of offload_gpu.py; norms and gates between them are one kernel each where there
is one (layer_ops.py), else operators over some tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from ray_hetero.kernels.layers.layer_parts import Linear, Norm, PostAttention
from ray_hetero.offload.expand.triton_runtime import kernels
from ray_hetero.offload.prefill.step_memory import StepMemory

CHUNK_TOKENS = 2048
"""Tokens whose norms and gates are computed together where there is no kernel for them."""
PROGRAM_COLUMNS = 2048
"""Columns of a row that a program of the gate's kernel computes."""
MOST_COLUMNS = 1 << 15
"""Most columns of a row whose norm one program takes."""


def chunks(tokens: int) -> Iterator[slice]:
    """Tokens of a step, as many at a time as intermediate results have room for."""
    for begin in range(0, tokens, CHUNK_TOKENS):
        yield slice(begin, begin + CHUNK_TOKENS)


def has_norm(norm: Norm, columns: int) -> bool:
    """Whether `add_and_norm_at_once` computes a norm of rows with so many columns."""
    return norm.kind in ("rms", "rms_plus_one") and norm.bias is None and columns <= MOST_COLUMNS


def add_and_norm_at_once(
    y: torch.Tensor | None,
    total: torch.Tensor,
    norm: Norm,
    weight: torch.Tensor,
    x: torch.Tensor,
) -> None:
    """Add y to `total`, and write the norm of the sum to x.

    Args:
        y: [M, N], bf16, contiguous; None adds nothing.
        total: [M, N], bf16, contiguous; written.
        norm: one that `has_norm`.
        weight: the norm's, [N], bf16, on the same device.
        x: [M, N], bf16, contiguous; written.

    """
    tokens, columns = total.shape
    kernels().add_and_norm[(tokens,)](
        total if y is None else y, total, weight, x, columns, norm.epsilon,
        y is not None, norm.kind == "rms_plus_one", 1 << (columns - 1).bit_length(),
        num_warps=8,
    )  # fmt: skip


def has_activation(parts: PostAttention) -> bool:
    """Whether `activate_at_once` computes what an MLP's `down` multiplies."""
    return parts.is_gated and parts.activation == "silu"


def activate_at_once(y: torch.Tensor, x: torch.Tensor) -> None:
    """Write SiLU(gate) · up to x.

    Args:
        y: [M, 2 · K], bf16, contiguous: gate and up.
        x: [M, K], bf16, contiguous; written.

    """
    tokens, columns = x.shape
    grid = (tokens, -(-columns // PROGRAM_COLUMNS))
    kernels().gated_silu[grid](y, x, columns, PROGRAM_COLUMNS)


class ComputesProducts(Protocol):
    """Products of a step on a GPU, and memory between them."""

    @property
    def uses_triton(self) -> bool:
        """Whether kernels of Triton compute what has one, instead of several operators."""

    @property
    def memory(self) -> StepMemory:
        """Memory for the tokens of a step."""

    @property
    def constant(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Biases and norms' weights, in bf16 on the GPU."""

    def product(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """x · Wᵀ + bias, [M, N], in memory that the next product overwrites."""


def behind(
    gpu: ComputesProducts, parts: PostAttention, attended: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """Result of a layer's operations after its attention: [M, N], to be added to `total`.

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


def _prepare(gpu: ComputesProducts, y: torch.Tensor, own: Norm | None, multiplier: float) -> None:
    """Make of a product [M, N] what is added to the residual, in place."""
    if own is not None:
        for rows in chunks(len(y)):
            y[rows] = norm(gpu, y[rows], own)
    if multiplier != 1:
        y *= multiplier


def norm(gpu: ComputesProducts, x: torch.Tensor, how: Norm) -> torch.Tensor:
    """The norm of x's last dimension, bf16."""
    bias = None if how.bias is None else gpu.constant(how.bias)
    return how(x, gpu.constant(how.weight), bias)


def add_and_norm(
    gpu: ComputesProducts, y: torch.Tensor | None, total: torch.Tensor, how: Norm
) -> torch.Tensor:
    """Add y to `total`; the norm of the sum, [M, N], in memory that the next one overwrites.

    Args:
        gpu: where both are.
        y: [M, N]; None adds nothing.
        total: [M, N].
        how: the norm of rows.

    """
    x = gpu.memory.to_multiply(*total.shape)
    if gpu.uses_triton and has_norm(how, total.shape[1]):
        add_and_norm_at_once(y, total, how, gpu.constant(how.weight), x)
        return x
    for rows in chunks(len(total)):
        if y is not None:
            total[rows] += y[rows]
        x[rows] = norm(gpu, total[rows], how)
    return x


def activated(gpu: ComputesProducts, parts: PostAttention, y: torch.Tensor) -> torch.Tensor:
    """Input of an MLP's `down`, [M, K], in the memory of norms.

    Args:
        gpu: where it is.
        parts: of the layer.
        y: what `gate_up` gave, [M, K or 2 · K].

    """
    tokens = y.shape[0]
    inputs = y.shape[1] // 2 if parts.is_gated else y.shape[1]
    x = gpu.memory.to_multiply(tokens, inputs)
    if gpu.uses_triton and has_activation(parts):
        activate_at_once(y, x)
        return x
    for rows in chunks(tokens):
        x[rows] = parts.activated(y[rows])
    return x

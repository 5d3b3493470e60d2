"""What is computed of each token by itself, between products on a GPU, in one kernel each.

A dozen operators of torch would read and write the tokens as often: of 8,192 tokens of an 8B model
that is a tenth of a layer's time.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from ray_hetero.kernels.layers.layer_parts import Norm, PostAttention

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
    """Whether `add_and_norm` computes a norm of rows with so many columns."""
    return norm.kind in ("rms", "rms_plus_one") and norm.bias is None and columns <= MOST_COLUMNS


def add_and_norm(
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
    _kernels().add_and_norm[(tokens,)](
        total if y is None else y, total, weight, x, columns, norm.epsilon,
        y is not None, norm.kind == "rms_plus_one", 1 << (columns - 1).bit_length(),
        num_warps=8,
    )  # fmt: skip


def has_activation(parts: PostAttention) -> bool:
    """Whether `activate` computes what an MLP's `down` multiplies."""
    return parts.is_gated and parts.activation == "silu"


def activate(y: torch.Tensor, x: torch.Tensor) -> None:
    """Write SiLU(gate) · up to x.

    Args:
        y: [M, 2 · K], bf16, contiguous: gate and up.
        x: [M, K], bf16, contiguous; written.

    """
    tokens, columns = x.shape
    grid = (tokens, -(-columns // PROGRAM_COLUMNS))
    _kernels().gated_silu[grid](y, x, columns, PROGRAM_COLUMNS)


@functools.cache
def _kernels() -> Any:
    """The kernels, imported when one is first used: builds for CPUs alone have no Triton."""
    return importlib.import_module("ray_hetero.kernels.prompts.gpu_rows_triton")

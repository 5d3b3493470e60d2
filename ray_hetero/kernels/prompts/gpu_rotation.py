"""Rotation of queries and keys on a GPU (Su et al., "RoFormer", 2021), arranged as in GPT-NeoX."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from ray_hetero.kernels.prompts.gpu_rows import chunks


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, uses_triton: bool) -> None:
    """Rotate heads in place.

    Args:
        heads: [tokens, heads, size], bf16; heads of a token are neighbours.
        cos: [tokens, 1, rotated / 2], float32, contiguous.
        sin: as `cos`.
        uses_triton: whether one kernel does it, where there are a dozen operators else.

    """
    half = cos.shape[-1]
    if uses_triton:
        tokens, count, size = heads.shape
        assert heads.stride()[1:] == (size, 1)
        _kernel()[(tokens,)](
            heads, cos, sin, heads.stride(0), count, size, half,
            _power_of_two(count), _power_of_two(half),
        )  # fmt: skip
        return
    for rows in chunks(len(heads)):
        some = heads[rows]
        left, right = some[..., :half].float(), some[..., half : 2 * half].float()
        some[..., :half] = left * cos[rows] - right * sin[rows]
        some[..., half : 2 * half] = right * cos[rows] + left * sin[rows]


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


@functools.cache
def _kernel() -> Any:
    """The kernel, imported when it is first used: builds for CPUs alone have no Triton."""
    return importlib.import_module("ray_hetero.kernels.prompts.gpu_rotation_triton").kernel

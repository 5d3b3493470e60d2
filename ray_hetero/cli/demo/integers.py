"""Weights rounded to integers of four bits, in groups along their inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BITS = 4
CODES = 1 << BITS
PER_WORD = 32 // BITS


@dataclass(frozen=True)
class Rounded:
    """W [N, K] ≈ (codes - zeros) · scales, each zero point and scale for a group."""

    codes: Any
    """[N, K], int32, 0 to 15."""
    zeros: Any
    """[N, groups], int32."""
    scales: Any
    """[N, groups], float32."""


def rounded(weight: Any, group: int, scale_type: Any, *, has_zeros: bool) -> Rounded:
    """Round a weight.

    Args:
        weight: [N, K], float32.
        group: inputs that share a scale.
        scale_type: scales are rounded to it first.
        has_zeros: whether each group uses its own range; else 8 stands for 0.

    """
    import torch

    outputs, inputs = weight.shape
    groups = weight.view(outputs, inputs // group, group)
    if has_zeros:
        least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((most - least) / (CODES - 1)).to(scale_type).float()
        zeros = (-least / scales).round().clamp(0, CODES - 1)
    else:
        scales = (groups.abs().amax(-1) / (CODES / 2 - 1)).to(scale_type).float()
        zeros = torch.full_like(scales, CODES // 2)
    codes = (groups / scales[..., None]).round() + zeros[..., None]
    return Rounded(
        codes.clamp(0, CODES - 1).to(torch.int32).view(outputs, inputs),
        zeros.to(torch.int32),
        scales,
    )


def packed(codes: Any, order: tuple[int, ...] = tuple(range(PER_WORD))) -> Any:
    """Eight neighbouring codes of the last dimension in one int32, from its lowest bits on.

    Args:
        codes: […, a multiple of 8], int32.
        order: which of the eight lies where.

    """
    import torch

    eight = codes.reshape(*codes.shape[:-1], -1, PER_WORD)[..., list(order)].to(torch.int64)
    words = (eight << torch.arange(0, 32, BITS)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)

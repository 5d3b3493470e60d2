"""Weights rounded to integers of four or eight bits, in groups along their inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BITS = 4


@dataclass(frozen=True)
class Rounded:
    """W [N, K] ≈ (codes - zeros) · scales, each zero point and scale for a group."""

    codes: Any
    """[N, K], int32, from 0 on."""
    zeros: Any
    """[N, groups], int32."""
    scales: Any
    """[N, groups], float32."""


def rounded(
    weight: Any, group: int, scale_type: Any, *, has_zeros: bool, bits: int = BITS
) -> Rounded:
    """Round a weight.

    Args:
        weight: [N, K], float32.
        group: inputs that share a scale.
        scale_type: scales are rounded to it first.
        has_zeros: whether each group uses its own range; else the middle of the codes stands for 0.
        bits: of a code.

    """
    import torch

    most_codes = 1 << bits
    outputs, inputs = weight.shape
    groups = weight.view(outputs, inputs // group, group)
    if has_zeros:
        least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((most - least) / (most_codes - 1)).to(scale_type).float()
        zeros = (-least / scales).round().clamp(0, most_codes - 1)
    else:
        scales = (groups.abs().amax(-1) / (most_codes / 2 - 1)).to(scale_type).float()
        zeros = torch.full_like(scales, most_codes // 2)
    codes = (groups / scales[..., None]).round() + zeros[..., None]
    return Rounded(
        codes.clamp(0, most_codes - 1).to(torch.int32).view(outputs, inputs),
        zeros.to(torch.int32),
        scales,
    )


def packed(codes: Any, order: tuple[int, ...] | None = None, *, bits: int = BITS) -> Any:
    """Neighbouring codes of the last dimension in one int32, from its lowest bits on.

    Args:
        codes: […, a multiple of the codes of a word], int32.
        order: which of a word's codes lies where; as they come if not given.
        bits: of a code.

    """
    import torch

    many = 32 // bits
    each = codes.reshape(*codes.shape[:-1], -1, many)[..., list(order or range(many))]
    words = (each.to(torch.int64) << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)

"""Random codes with scales, as quantised checkpoints store weights."""

from __future__ import annotations

import torch

from ray_hetero.kernels.formats import ScaledWeight
from ray_hetero.kernels.formats.fp8 import NAN, Fp8Weight
from ray_hetero.kernels.formats.scaled import Codes

TYPES = {
    "bfloat16": torch.bfloat16, "float32": torch.float32, "float8_e8m0fnu": torch.float8_e8m0fnu,
    "float8_e4m3fn": torch.float8_e4m3fn,
}  # fmt: skip
MIDDLE = 127
"""The exponent of 1 in E8M0."""


def made(
    kind: type[ScaledWeight],
    outputs: int,
    inputs: int,
    group: int,
    *,
    scales: str | None = None,
    has_zeros: bool = False,
    is_uniform: bool = False,
    seed: int = 0,
) -> Codes:
    """Random codes, all that the format has, with random scales."""
    random = torch.Generator().manual_seed(seed)
    most = 1 << kind.bits
    shuffled = torch.randperm(outputs * inputs, generator=random) % most
    codes = shuffled.to(torch.uint8).view(outputs, inputs)
    if kind is Fp8Weight:
        codes = torch.where((codes & NAN) == NAN, codes & 0x80, codes)
    groups = -(-inputs // group)
    shape = (outputs // 32 if is_uniform else outputs, groups)
    name = scales or kind.scale_types[0]
    if name == "float8_e8m0fnu":
        exponents = torch.randint(MIDDLE - 20, MIDDLE + 20, shape, generator=random)
        values = exponents.to(torch.uint8).view(TYPES[name])
    else:
        values = torch.randn(shape, generator=random).to(TYPES[name])
    zeros = None
    if has_zeros:
        zeros = torch.randint(0, most, (outputs, groups), generator=random).to(torch.uint8)
    return Codes(codes, values, group, zeros, 0.0371 if name == "float8_e4m3fn" else 1.0)

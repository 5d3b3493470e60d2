"""Codes of quantised weights, from the tensors that checkpoints hold.

This module needs PyTorch, not vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.formats.base import BLOCK
from ray_hetero.kernels.formats.fp4 import Fp4Weight
from ray_hetero.kernels.formats.scaled import Codes

MX_GROUP, NVFP4_GROUP = 32, 16
"""Inputs that share a scale in the formats of the OCP and of NVIDIA."""
CODES_PER_WORD = 8
"""Codes of four bits in a word of 32."""


def check_groups(inputs: int, scales: int, group: int) -> None:
    """Compare scales of integers of four bits with the size of a group; the last may have fewer.

    Args:
        inputs: of the weight.
        scales: of an output.
        group: inputs that share a scale.

    Raises:
        UnsupportedError: there are more or fewer.

    """
    if scales != (expected := -(-inputs // group)):
        raise UnsupportedError(
            f"experts in int4 with a scale for every {group} inputs: expected {inputs} / {group} = "
            f"{inputs / group:g}, so {expected} scales of an output, got {scales}"
        )


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [N, K], uint8, of integers or bytes [N, …] that hold them from the lowest bits on."""
    held = words.contiguous().view(torch.uint8)
    if bits == 8:
        return held
    return torch.stack((held & 15, held >> 4), dim=-1).view(len(held), -1)


def micro_floats(weight: torch.Tensor, scales: torch.Tensor) -> Codes:
    """MXFP4: floats of four bits [N, K / 2], two in a byte, with exponents [N, groups], uint8."""
    exponents = scales.view(torch.float8_e8m0fnu)
    return Codes(unpacked(weight, Fp4Weight.bits), exponents, MX_GROUP)


def nano_floats(weight: torch.Tensor, scales: torch.Tensor, factor: float) -> Codes:
    """NVFP4: floats of four bits [N, K / 2], with scales [N, groups], E4M3, times a factor."""
    return Codes(unpacked(weight, Fp4Weight.bits), scales, NVFP4_GROUP, factor=factor)


def block_floats(
    weight: torch.Tensor, scales: torch.Tensor, shape: Sequence[int], *, by_output: bool = False
) -> Codes:
    """Floats of eight bits with scales for blocks.

    Args:
        weight: [N, K], E4M3.
        scales: [N / rows, K / columns], rounded up; E8M0 also as uint8.
        shape: rows and columns of a block.
        by_output: whether each output is to have scales of its own, so that outputs can be put in
            another order.

    """
    rows, columns = shape
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    same = BLOCK if rows % BLOCK == 0 and not by_output else 1
    if scales.dtype == torch.float8_e8m0fnu and same == 1:
        # A byte each, as the checkpoint has them.
        exponents = scales.contiguous().view(torch.uint8)
        of_outputs = exponents.repeat_interleave(rows, 0)[: len(weight)].view(scales.dtype)
    else:
        of_outputs = scales.float().repeat_interleave(rows // same, 0)[: len(weight) // same]
    return Codes(weight.contiguous().view(torch.uint8), of_outputs, columns)


def row_floats(weight: torch.Tensor, scales: torch.Tensor, *, by_output: bool = False) -> Codes:
    """Floats of eight bits [N, K] with scales for outputs, or for all; see `block_floats`."""
    outputs, inputs = weight.shape
    of_outputs = scales.float().reshape(-1, 1)
    if len(of_outputs) == 1:
        of_outputs = of_outputs.expand(outputs if by_output else outputs // BLOCK, 1)
    return Codes(weight.contiguous().view(torch.uint8), of_outputs, inputs)

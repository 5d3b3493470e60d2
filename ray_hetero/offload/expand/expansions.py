"""Expansion of weights on a GPU, by their format.

A GPU reads weights in the format that the cores compute with, and multiplies them in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ray_hetero.kernels.formats import SCALED_FORMATS, CompactWeight, HostWeight, PackedWeight
from ray_hetero.kernels.formats.base import BLOCK
from ray_hetero.offload.expand import compact_expansion, scaled_expansion
from ray_hetero.offload.expand.stacks import (
    AsOneWeight,
    Expansion,
    Stack,
    StackExpansion,
    stacks_of,
)


@dataclass(frozen=True)
class PackedExpansion:
    """Expansion of any outputs of a packed weight: outputs of a block become rows."""

    inputs: int

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor) -> None:
        """Write outputs as `Expansion` does."""
        packed = rows.view(torch.bfloat16).view(-1, self.inputs // 2, BLOCK, 2)
        into = weight.view(-1, BLOCK, self.inputs // 2, 2)
        into.copy_(packed.permute(0, 2, 1, 3))


@dataclass(frozen=True)
class _Expansions:
    """Expansions of a format."""

    part: Callable[[Stack, int, int, torch.device], Expansion]
    stack: Callable[[Stack, torch.device], StackExpansion]


_BY_FORMAT = {
    PackedWeight.name: _Expansions(
        lambda stack, begin, end, device: PackedExpansion(stack.shape[1]),
        lambda stack, device: AsOneWeight(PackedExpansion(stack.shape[1])),
    ),
    CompactWeight.name: _Expansions(
        compact_expansion.part_expansion, compact_expansion.stack_expansion
    ),
    **dict.fromkeys(
        SCALED_FORMATS,
        _Expansions(scaled_expansion.part_expansion, scaled_expansion.stack_expansion),
    ),
}  # fmt: skip
"""Expansions by the name of the format.  Those of a new one are added here."""


def stack_of(weight: HostWeight) -> Stack:
    """A weight as a stack of its own."""
    (stack,) = stacks_of([weight])
    return stack


def part_expansion(stack: Stack, begin: int, end: int, device: torch.device) -> Expansion:
    """Make the expansion of some outputs of a stack of one weight.

    Args:
        stack: of one weight.
        begin: first output, a multiple of 32.
        end: the one behind the last, the same.
        device: what expands them.

    """
    assert stack.count == 1, stack.count
    return _BY_FORMAT[stack.format].part(stack, begin, end, device)


def stack_expansion(stack: Stack, device: torch.device) -> StackExpansion:
    """Make the expansion of the weights of a stack, whose numbers are from its first on."""
    return _BY_FORMAT[stack.format].stack(stack, device)

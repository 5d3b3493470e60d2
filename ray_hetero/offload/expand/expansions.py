"""Expansion of weights on a GPU, by their format.

A GPU reads weights in the format that the cores compute with, and multiplies them in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ray_hetero.kernels.formats import SCALED_FORMATS, CompactWeight, HostWeight, PackedWeight
from ray_hetero.kernels.formats.base import BLOCK
from ray_hetero.offload.expand import compact_expansion, scaled_expansion
from ray_hetero.offload.expand.stacks import Expansion, Stack, stacks_of


@dataclass(frozen=True)
class PackedExpansion:
    """Expansion of packed weights: outputs of a block become rows."""

    inputs: int

    def __call__(self, rows: torch.Tensor, weights: torch.Tensor, first: int = 0) -> None:
        """Write weights as `Expansion` does."""
        packed = rows.view(torch.bfloat16).view(-1, self.inputs // 2, BLOCK, 2)
        into = weights.view(-1, BLOCK, self.inputs // 2, 2)
        into.copy_(packed.permute(0, 2, 1, 3))


_BY_FORMAT: dict[str, Callable[[Stack, torch.device], Expansion]] = {
    PackedWeight.name: lambda stack, device: PackedExpansion(stack.shape[1]),
    CompactWeight.name: compact_expansion.expansion_of,
    **dict.fromkeys(SCALED_FORMATS, scaled_expansion.expansion_of),
}
"""Makes the expansion of a stack, by the name of its format.  That of a new one is added here."""
_TABLES_OF_PARTS = {CompactWeight.name: compact_expansion.tables_of_part}
"""Tables of some outputs of a weight, by the name of its format, of formats that have tables."""


def expansion_of(stack: Stack, device: torch.device) -> Expansion:
    """Make the expansion of the weights of a stack."""
    return _BY_FORMAT[stack.format](stack, device)


def stack_of(weight: HostWeight) -> Stack:
    """A weight as a stack of its own."""
    (stack,) = stacks_of([weight])
    return stack


def part_of(stack: Stack, begin: int, end: int) -> Stack:
    """Some outputs of a weight as a stack of their own.

    Args:
        stack: of one weight.
        begin: first output, a multiple of 32.
        end: the one behind the last, the same.

    """
    assert stack.count == 1, stack.count
    outputs, inputs = stack.shape
    tables = stack.tables
    if stack.format in _TABLES_OF_PARTS:
        tables = _TABLES_OF_PARTS[stack.format](tables, inputs, begin, end)
    nbytes = stack.nbytes // outputs * (end - begin)
    return replace(stack, shape=(end - begin, inputs), nbytes=nbytes, tables=tables)

"""Weights that a GPU has expanded in whole, ahead of their products.

Pieces that lie one behind the other in its memory are multiplied in one product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter

import torch

from ray_hetero.kernels.prompts.piece_reader import PieceReader
from ray_hetero.kernels.prompts.reading_order import ReadingOrder
from ray_hetero.kernels.prompts.weight_pieces import Placed


@dataclass(frozen=True, eq=False)
class ExpandedPart:
    """Pieces of a weight that are neighbours."""

    outputs: slice
    inputs: slice
    is_added: bool
    """Whether the products are added to those before, as in `Placed`."""
    values: torch.Tensor
    """[outputs · inputs], bf16."""

    def is_before(self, other: ExpandedPart) -> bool:
        """Whether another one's outputs follow those of this one, in memory too."""
        return (
            (self.inputs, self.is_added) == (other.inputs, other.is_added)
            and self.outputs.stop == other.outputs.start
        )  # fmt: skip

    def with_next(self, other: ExpandedPart) -> ExpandedPart:
        """Both in one."""
        outputs = slice(self.outputs.start, other.outputs.stop)
        values = self.values.as_strided((len(self.values) + len(other.values),), (1,))
        return replace(self, outputs=outputs, values=values)

    @property
    def weight(self) -> torch.Tensor:
        """[inputs, outputs]."""
        return self.values.view(-1, self.inputs.stop - self.inputs.start).t()


@dataclass(eq=False)
class ExpandedWeight:
    """The first pieces of a weight, or all, expanded ahead."""

    placed: int = 0
    """Number of the parts of pieces that are there, of those in their order."""
    parts: list[ExpandedPart] = field(default_factory=list)

    def add(self, placed: Placed, values: torch.Tensor) -> None:
        """Add what comes next of a piece, whose memory follows that of what came before."""
        part = ExpandedPart(placed.outputs, placed.inputs, placed.is_added, values)
        if self.parts and self.parts[-1].is_before(part):
            part = self.parts.pop().with_next(part)
        self.parts.append(part)
        self.placed += 1


class WeightsAhead:
    """What has been expanded ahead, of weights that are known by their addresses."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        """Addresses of the weights that were asked for, as far as there is room."""
        self._weights: dict[int, ExpandedWeight] = {}

    def has(self, addresses: list[int]) -> bool:
        """Whether these were asked for last, and nothing has taken their place."""
        return self._addresses == addresses

    def of(self, address: int) -> ExpandedWeight:
        """What is there of a weight."""
        return self._weights.get(address, ExpandedWeight())

    def expand(
        self,
        addresses: list[int],
        pieces: Mapping[int, Sequence[Placed]],
        reader: PieceReader,
        order: ReadingOrder,
        memory: torch.Tensor,
    ) -> None:
        """Have weights come and be expanded, until the memory is full.

        Args:
            addresses: of the weights, in the order of their products.
            pieces: of all weights, by address.
            reader: of pieces.
            order: of steps that use these weights.
            memory: of the GPU, bf16; what was in it before is forgotten.

        """
        self.forget()
        self._addresses = addresses
        for at in addresses:
            expanded = self._weights[at] = ExpandedWeight()
            for piece, parts in groupby(pieces[at], attrgetter("piece")):
                if piece.values > len(memory):
                    return
                weight, memory = memory[: piece.values], memory[piece.values :]
                reader.expand_into(order, piece, weight)
                for placed in parts:
                    expanded.add(placed, weight.view(-1, piece.inputs)[placed.rows].view(-1))

    def forget(self) -> None:
        """Have nothing ahead any more."""
        self._addresses = []
        self._weights.clear()

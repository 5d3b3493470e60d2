"""Weights in host memory, cut into the pieces that a GPU reads them in (piece_reader.py)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ray_hetero.kernels.formats import HostWeight
from ray_hetero.kernels.formats.base import BLOCK
from ray_hetero.offload.expand.expansions import expansion_of, part_of, stack_of
from ray_hetero.offload.expand.stacks import Expansion, Stack
from ray_hetero.planning.prefill_memory import BF16_BYTES, piece_bytes

TILE_OUTPUTS = 256
"""Outputs of one tile of a GPU's product, or of two: parts of a tile cost as much."""


Run = tuple[int, int, int]
"""Outputs that are neighbours: first, last, and where the first is among those of the whole."""


class LinkedSource(Protocol):
    """A weight of another process in memory that both map."""

    stack: Stack
    """The weight's format, and what belongs to it beside its rows."""

    @property
    def data(self) -> torch.Tensor:
        """[N, …], contiguous, in host memory; see `HostWeight.data`."""

    @property
    def shape(self) -> tuple[int, int]:
        """N, K."""

    @property
    def gpu_bytes(self) -> int:
        """Memory of a GPU that its expansions take all together."""


Source = HostWeight | LinkedSource
"""A weight that a GPU reads: of this process, or of one that shares it."""


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a weight whose rest other ranks hold."""

    source: Source
    outputs: tuple[Run, ...]
    """Outputs of the part in runs, which ascend."""
    inputs: int = 0
    """Place of the part's first input among those of the whole."""
    is_added: bool = False
    """Whether its products are added to those of parts before."""

    def cut_from(self, most: int | None) -> list[tuple[Run, ...]]:
        """Runs whose pieces are cut together: all of them if they follow one another and are few.

        Args:
            most: outputs of a piece; None to cut each run by itself.

        """
        begin, end = self.outputs[0][0], self.outputs[-1][1]
        are_neighbours = sum(last - first for first, last, _ in self.outputs) == end - begin
        if most is not None and are_neighbours and end - begin <= most:
            return [self.outputs]
        return [(run,) for run in self.outputs]


@dataclass(frozen=True, eq=False)
class WholeWeight:
    """A weight in parts that one or more ranks hold."""

    parts: tuple[Part, ...]
    shape: tuple[int, int]
    """N, K of the whole."""

    @property
    def data(self) -> torch.Tensor:
        """Data of the first part, by which the weight is known."""
        return self.parts[0].source.data

    @property
    def nbytes(self) -> int:
        """Bytes of all parts in host memory."""
        return sum(part.source.data.nbytes for part in self.parts)

    @property
    def gpu_bytes(self) -> int:
        """Memory of a GPU that its expansions take all together."""
        return sum(part.source.gpu_bytes for part in self.parts)

    @staticmethod
    def parts_of(weight: Source | WholeWeight) -> tuple[Part, ...]:
        """The parts of a weight of one rank, or of several."""
        whole = weight if isinstance(weight, WholeWeight) else WholeWeight.of_one(weight)
        return whole.parts

    @classmethod
    def of_one(cls, weight: Source) -> WholeWeight:
        """A weight that is in one part."""
        return cls.by_columns([weight], [weight.shape[0]])

    @classmethod
    def by_columns(cls, ranks: Sequence[Source], sizes: Sequence[int]) -> WholeWeight:
        """Weight of which each rank holds some outputs (column parallel).

        Args:
            ranks: their weights, alike in shape.
            sizes: outputs of a rank that belong together, one after the other: those of queries, of
                keys and of values; multiples of 32.  In the whole, all ranks' of one kind are
                neighbours.

        """
        outputs, inputs = ranks[0].shape
        assert sum(sizes) == outputs, (sizes, outputs)
        assert not any(size % BLOCK for size in sizes), sizes
        begins = list(itertools.accumulate(sizes, initial=0))
        parts = [
            Part(
                weight,
                tuple(
                    (begin, begin + size, len(ranks) * begin + own * size)
                    for begin, size in zip(begins, sizes, strict=False)
                ),
            )
            for own, weight in enumerate(ranks)
        ]
        return cls(tuple(parts), (len(ranks) * outputs, inputs))

    @classmethod
    def by_rows(cls, ranks: Sequence[Source]) -> WholeWeight:
        """Weight of which each rank holds some inputs (row parallel); all parts have one shape."""
        outputs, inputs = ranks[0].shape
        parts = [
            Part(weight, ((0, outputs, 0),), own * inputs, is_added=own > 0)
            for own, weight in enumerate(ranks)
        ]
        return cls(tuple(parts), (outputs, len(ranks) * inputs))


@dataclass(eq=False)
class Piece:
    """Neighbouring blocks of a weight [outputs, inputs]."""

    weight: torch.Tensor
    """[end - begin, …] of `HostWeight.data`, in host memory."""
    begin: int
    end: int
    inputs: int
    expansion: Expansion
    stored: torch.Tensor = field(init=False)
    """The same as bytes, one after the other."""

    def __post_init__(self) -> None:
        # Once, and not for each of its copies, hundreds of which one thread orders a second.
        self.stored = self.weight.view(torch.uint8).view(-1)

    @property
    def values(self) -> int:
        """Weights of the piece."""
        return (self.end - self.begin) * self.inputs


@dataclass(frozen=True, eq=False)
class WeightSlice:
    """Outputs of a piece that are neighbours in a whole weight too."""

    piece: Piece
    rows: slice
    """Outputs of the piece that they are."""
    outputs: slice
    """Outputs of the whole weight that they are."""
    inputs: slice
    is_added: bool
    """Whether its products are added to those of pieces before."""


def cut(
    whole: WholeWeight, device: torch.device, most_outputs: int | None = None
) -> Iterator[WeightSlice]:
    """The pieces of a weight, part by part in the order of its outputs.

    Runs of a part that fit into one piece come in one, as queries, keys and values of a rank do: it
    takes as long to order the copy and the expansion of a small piece as of a large one.

    Args:
        whole: in host memory.
        device: what expands it.
        most_outputs: of a piece, a multiple of 32, each of one run; None for as many as a piece has
            room for.

    """
    for part in whole.parts:
        inputs, source = part.source.shape[1], part.source
        stack = stack_of(source) if isinstance(source, HostWeight) else source.stack
        most = most_outputs or piece_bytes(inputs) // (BF16_BYTES * BLOCK * inputs) * BLOCK
        columns = slice(part.inputs, part.inputs + inputs)
        for runs in part.cut_from(most if most_outputs is None else None):
            begin, end = runs[0][0], runs[-1][1]
            step = piece_outputs(end - begin, most)
            for first in range(begin, end, step):
                last = min(first + step, end)
                expansion = expansion_of(part_of(stack, first, last), device)
                piece = Piece(part.source.data[first:last], first, last, inputs, expansion)
                for rows, outputs in _within(piece, runs):
                    yield WeightSlice(piece, rows, outputs, columns, part.is_added)


def _within(piece: Piece, runs: Sequence[Run]) -> Iterator[tuple[slice, slice]]:
    """Outputs of runs that a piece has: which of its own they are, and which of the whole."""
    for first, last, place in runs:
        begin, end = max(first, piece.begin), min(last, piece.end)
        if begin < end:
            at = place + begin - first
            yield slice(begin - piece.begin, end - piece.begin), slice(at, at + end - begin)


def piece_outputs(outputs: int, most: int) -> int:
    """Outputs of each of as few pieces as there can be, which are as alike as tiles allow.

    Args:
        outputs: of all pieces, a multiple of 32.
        most: of a piece, a multiple of 32.

    """
    even = -(-outputs // -(-outputs // most))
    tiles, blocks = (-(-even // unit) * unit for unit in (TILE_OUTPUTS, BLOCK))
    return tiles if tiles <= most else blocks

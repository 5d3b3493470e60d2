"""Experts that a GPU reads from host memory piece by piece, each ahead of its use."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ray_hetero.offload.experts.linked_experts import LinkedSlice
from ray_hetero.offload.weights.link_reader import LinkReader, Slot
from ray_hetero.planning.prefill_memory import EXPERT_SLOTS

Run = tuple[int, int]
"""Neighbouring experts: the first one, and the one behind the last."""


def runs_of(experts: Sequence[int]) -> tuple[Run, ...]:
    """Neighbours among experts, whose numbers ascend."""
    groups = itertools.groupby(enumerate(experts), lambda one: one[1] - one[0])
    members = ([expert for _, expert in group] for _, group in groups)
    return tuple((some[0], some[-1] + 1) for some in members)


@dataclass(frozen=True)
class Part:
    """The experts of a layer that one GPU of a stage reads: neighbours, as many as every other."""

    rank: int = 0
    """Number of the GPU in its stage."""
    size: int = 1
    """GPUs that divide a layer's experts among them."""

    def block(self, count: int) -> range:
        """All experts that this GPU may be asked for, of a layer of so many."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def first(self, experts: int, count: int) -> range:
        """Experts that this GPU computes where all of them compute so many of a layer.

        Args:
            experts: of all GPUs together, at most those of the layer; a GPU whose block is too
                small for its share computes the block.
            count: experts of the layer.

        """
        return self.block(count)[: len(self.block(experts))]

    def of_all(self, experts: int, count: int) -> list[int]:
        """Experts that all GPUs compute, see `first`."""
        parts = (Part(rank, self.size) for rank in range(self.size))
        return [expert for part in parts for expert in part.first(experts, count)]


WHOLE = Part()
"""The part of a GPU that reads all experts of a stage."""


@dataclass(eq=False)
class Piece:
    """Some experts of a layer, in the order of their numbers."""

    slices: tuple[LinkedSlice, ...]
    runs: tuple[Run, ...]
    places: torch.Tensor | None
    """[experts of the layer], int32, on the GPU: which one of the piece each is, -1 for none of
    them; None where the piece has all."""
    after: Piece | None = None
    """The one that comes next."""


class ExpertPieces:
    """The pieces of layers, each with what comes after it in a step that computes as many of the
    first experts of every layer's part.

    Args:
        device: the GPU.
        layers: slices of each by its number; None is a layer that is not read.
        most: experts of a piece.
        part: of every layer, that is read here.

    """

    def __init__(
        self,
        device: torch.device,
        layers: Sequence[tuple[LinkedSlice, ...] | None],
        most: int,
        part: Part,
    ) -> None:
        self._device = device
        self._part = part
        self._layers = layers
        self._most = most
        self._chains: dict[int, dict[int, tuple[Piece, ...]]] = {}
        self._places: dict[tuple[int, int, int], torch.Tensor] = {}

    def first(self, layer: int, experts: int) -> tuple[Piece, ...]:
        """The pieces of so many experts of a layer's part, its first ones, one at least; always the
        same objects.
        """
        if experts not in self._chains:
            self._chains[experts] = dict(self._chain(experts))
        return self._chains[experts][layer]

    def of(self, layer: int, experts: Sequence[int]) -> tuple[Piece, ...]:
        """Pieces of these experts of a layer, in the order of their numbers, of this step only."""
        slices = self._layers[layer]
        assert slices is not None, layer
        groups = [experts[at : at + self._most] for at in range(0, len(experts), self._most)]
        return _in_order(
            Piece(slices, runs_of(group), self._places_of(group, slices[0].count))
            for group in groups
        )

    def _chain(self, experts: int) -> Iterator[tuple[int, tuple[Piece, ...]]]:
        before: Piece | None = None
        for number, slices in enumerate(self._layers):
            if slices is None:
                before = None
                continue
            count = slices[0].count
            asked = self._part.block(count)[:experts]
            # As alike as can be: while the largest one comes, nothing else does.
            each = -(-len(asked) // -(-len(asked) // self._most))
            pieces = _in_order(
                Piece(slices, ((begin, end),), self._places_of_run(begin, end, count))
                for begin in asked[::each]
                for end in [min(begin + each, asked.stop)]
            )
            if before is not None:
                before.after = pieces[0]
            before = pieces[-1]
            yield number, pieces

    def _places_of_run(self, begin: int, end: int, count: int) -> torch.Tensor | None:
        """Places of neighbouring experts, which layers have in common."""
        if end - begin == count:
            return None
        key = (begin, end, count)
        if key not in self._places:
            found = self._places_of(range(begin, end), count)
            assert found is not None, "some are left out"
            self._places[key] = found
        return self._places[key]

    def _places_of(self, experts: Sequence[int], count: int) -> torch.Tensor | None:
        if len(experts) == count:
            return None
        here = torch.full((count,), -1, dtype=torch.int32)
        here[list(experts)] = torch.arange(len(experts), dtype=torch.int32)
        return here.to(self._device)


def _in_order(made: Iterable[Piece]) -> tuple[Piece, ...]:
    pieces = tuple(made)
    for piece, after in itertools.pairwise(pieces):
        piece.after = after
    return pieces


class ExpertReader(LinkReader[Piece]):
    """Reads pieces over the link on a stream of its own, beside the products.

    Args:
        device: the GPU; for tests the CPU.
        module: that makes its streams and events.
        starts: where each half of each slice begins in a slot.
        nbytes: of a slot.

    """

    def __init__(
        self, device: torch.device, module: Any, starts: Sequence[int], nbytes: int
    ) -> None:
        super().__init__(device, module, EXPERT_SLOTS, nbytes)
        self._starts = starts

    def copies(self, piece: Piece) -> Iterator[tuple[torch.Tensor, int]]:
        """Rows of each half of each slice, one run behind the other."""
        halves = [half for one in piece.slices for half in one.halves]
        for half, start in zip(halves, self._starts, strict=True):
            at = start
            for first, last in piece.runs:
                rows = half.memory[half.begin(first) : half.begin(last)]
                yield rows, at
                at += rows.numel()

    def expect(self, piece: Piece) -> None:
        """Order a piece, and what comes after it, as far as there are slots."""
        if all(slot.piece is not piece for slot in self._ahead):
            # What was expected in its place does not come.
            self.forget()
            self.fetch(piece)
        self.read_ahead(piece, _after)

    def next(self, piece: Piece, computing: Any) -> Slot[Piece]:
        """The slot that has a piece, once what a stream is told from now on begins."""
        self.expect(piece)
        while (slot := self._ahead.popleft()).piece is not piece:
            pass
        computing.wait_event(slot.ready)
        return slot

    def give_back(self, slot: Slot[Piece], computing: Any) -> None:
        """Let a slot have another piece once the stream has done what it was told."""
        slot.free.record(computing)
        assert slot.piece is not None, "it was asked for"
        self.read_ahead(slot.piece, _after)


def _after(piece: Piece) -> Piece | None:
    return piece.after

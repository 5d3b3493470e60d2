"""Experts that a GPU reads from host memory piece by piece, each ahead of its use."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ray_hetero.kernels.linked_experts import LinkedSlice
from ray_hetero.kernels.weight_pieces import LinkReader, Slot
from ray_hetero.planning.prefill_memory import EXPERT_SLOTS

Run = tuple[int, int]
"""Neighbouring experts: the first one, and the one behind the last."""


def runs_of(experts: Sequence[int]) -> tuple[Run, ...]:
    """Neighbours among experts, whose numbers ascend."""
    groups = itertools.groupby(enumerate(experts), lambda one: one[1] - one[0])
    members = ([expert for _, expert in group] for _, group in groups)
    return tuple((some[0], some[-1] + 1) for some in members)


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
        self.read_ahead(piece)

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
        self.read_ahead(slot.piece)

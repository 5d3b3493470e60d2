"""Experts that a GPU reads from host memory piece by piece, each ahead of its use."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ray_hetero.kernels.linked_experts import LinkedSlice
from ray_hetero.kernels.weight_pieces import current
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

    def copies(self, starts: Sequence[int]) -> Iterator[tuple[torch.Tensor, int]]:
        """What is to be copied, and to where.

        Args:
            starts: where each half of each slice begins.

        """
        halves = [half for one in self.slices for half in one.halves]
        for half, start in zip(halves, starts, strict=True):
            at = start
            for first, last in self.runs:
                rows = half.memory[half.begin(first) : half.begin(last)]
                yield rows, at
                at += rows.numel()


@dataclass(eq=False)
class Slot:
    """Memory on the GPU for one piece as it is stored."""

    memory: torch.Tensor
    """Bytes."""
    ready: Any
    """Event: the piece has come."""
    free: Any
    """Event: nothing reads it any more."""
    piece: Piece | None = None


class ExpertReader:
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
        self._starts = starts
        self._copying = module.Stream()
        slots = [
            Slot(torch.empty(nbytes, dtype=torch.uint8, device=device), module.Event(),
                 module.Event())
            for _ in range(EXPERT_SLOTS)
        ]  # fmt: skip
        self._slots = itertools.cycle(slots)
        self._ahead: deque[Slot] = deque()

    def expect(self, piece: Piece) -> None:
        """Order a piece, and what comes after it, as far as there are slots."""
        if all(slot.piece is not piece for slot in self._ahead):
            # What was expected in its place does not come.
            self._ahead.clear()
            self._fetch(piece)
        self._read_ahead(piece)

    def next(self, piece: Piece, computing: Any) -> Slot:
        """The slot that has a piece, once what a stream is told from now on begins."""
        self.expect(piece)
        while (slot := self._ahead.popleft()).piece is not piece:
            pass
        computing.wait_event(slot.ready)
        return slot

    def give_back(self, slot: Slot, computing: Any) -> None:
        """Let a slot have another piece once the stream has done what it was told."""
        slot.free.record(computing)
        assert slot.piece is not None, "it was asked for"
        self._read_ahead(slot.piece)

    def _read_ahead(self, last: Piece) -> None:
        """Order what comes after the last piece that was ordered, `last` where all have come."""
        following = (self._ahead[-1].piece or last) if self._ahead else last
        while len(self._ahead) < EXPERT_SLOTS and following.after is not None:
            following = following.after
            self._fetch(following)

    def _fetch(self, piece: Piece) -> None:
        slot = next(self._slots)
        with current(self._copying):
            self._copying.wait_event(slot.free)
            for rows, at in piece.copies(self._starts):
                slot.memory[at : at + rows.numel()].copy_(rows, non_blocking=True)
            slot.ready.record(self._copying)
        slot.piece = piece
        self._ahead.append(slot)

"""Pieces of weights that stay on a GPU from one decode step to the next.

Prompts of thousands of tokens need memory that decode steps leave idle: of tokens between products,
of cached keys and values on their way, of pieces that are expanded.  There some of the pieces stay
that every decode step computes with, so that neither the link nor the socket's memory is read for
them again.  The next prompt takes their place, and the step after it has them come anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ray_hetero.kernels.prompts.link_reader import SLOT_ALIGNMENT, Slot, slot_bytes
from ray_hetero.kernels.prompts.reading_order import ReadingOrder
from ray_hetero.kernels.prompts.weight_pieces import Piece


@dataclass(frozen=True, eq=False)
class IdleMemory:
    """Memory of a GPU that decode steps leave idle."""

    memory: torch.Tensor
    """uint8."""
    used: Any = None
    """Event: a stream beside that of products has done with it; None if there is no such stream."""
    free: Any = None
    """Event that this stream waits for before it writes again; None likewise."""


_Places = tuple[Sequence[IdleMemory], dict[Piece, Slot[Piece]]]


class KeptPieces:
    """The pieces of steps of one kind that stay, and where.

    Args:
        module: that makes events.
        computing: the stream that products are computed on, and that larger steps write this memory
            on.

    """

    def __init__(self, module: Any, computing: Any) -> None:
        self._module = module
        self._computing = computing
        self._order: ReadingOrder | None = None
        self._slots: dict[Piece, Slot[Piece]] = {}
        self._idle: Sequence[IdleMemory] = ()
        self._known: WeakKeyDictionary[ReadingOrder, _Places] = WeakKeyDictionary()
        """Memory and places of each order, the same whenever it comes again."""

    def begin(
        self, order: ReadingOrder, pieces: Sequence[Piece],
        memory: Callable[[], Sequence[IdleMemory]],
    ) -> None:  # fmt: skip
        """Begin a step whose pieces may stay; those of another order do so no longer.

        Args:
            order: of steps that use these pieces.
            pieces: all of a step, in their order.
            memory: gives memory which nothing else uses until `forget`.

        """
        if self._order is not order:
            self.forget()
            self._order = order
            if order not in self._known:
                idle = memory()
                self._known[order] = idle, self._places(pieces, [one.memory for one in idle])
            self._idle, self._slots = self._known[order]
        if self.is_complete:
            return
        for one in self._idle:
            if one.used is not None:
                self._computing.wait_event(one.used)
        for slot in self._slots.values():
            if slot.piece is None:
                # What comes here waits for the products that have used this memory up to now.
                slot.free.record(self._computing)

    @property
    def is_complete(self) -> bool:
        """Whether all pieces that are to stay are there, or on their way."""
        return all(slot.piece is not None for slot in self._slots.values())

    def _places(
        self, pieces: Sequence[Piece], memory: Iterable[torch.Tensor]
    ) -> dict[Piece, Slot[Piece]]:
        largest = max(piece.weight.nbytes for piece in pieces)
        rooms = [room for one in memory for room in _rooms(one, largest)]
        count = min(len(rooms), len(pieces))
        # Evenly among all, so that the link has as much to do for each layer.
        chosen = [pieces[number * len(pieces) // count] for number in range(count)]
        return {
            piece: Slot(room, self._module.Event(), self._module.Event())
            for piece, room in zip(chosen, rooms, strict=False)
        }

    def slot(self, piece: Piece) -> Slot[Piece] | None:
        """Memory of a piece that stays, which it may still have to be copied to."""
        return self._slots.get(piece)

    def has(self, piece: Piece) -> bool:
        """Whether a piece is there, or on its way."""
        slot = self._slots.get(piece)
        return slot is not None and slot.piece is not None

    def forget(self) -> None:
        """Have no piece stay: other things are to be written to this memory."""
        taken = [slot for slot in self._slots.values() if slot.piece is not None]
        for slot in taken:
            # A copy that is on its way would overwrite them.
            self._computing.wait_event(slot.ready)
            slot.piece = None
        for one in self._idle if taken else ():
            if one.free is not None:
                one.free.record(self._computing)


def _rooms(memory: torch.Tensor, nbytes: int) -> list[torch.Tensor]:
    """Memory for as many pieces as there is room for."""
    begin = -memory.data_ptr() % SLOT_ALIGNMENT
    step = slot_bytes(nbytes)
    count = max(0, len(memory) - begin) // step
    return list(memory[begin : begin + count * step].view(count, step))

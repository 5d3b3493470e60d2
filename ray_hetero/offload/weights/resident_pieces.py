"""Pieces of weights that stay on a GPU from one decode step to the next.

Prompts of thousands of tokens need memory that decode steps leave idle: of tokens between products,
of cached keys and values on their way, of pieces that are expanded.  There some of the pieces stay
that every decode step computes with, so that neither the link nor the socket's memory is read for
them again.  The next prompt takes their place, of as many as it has tokens for, and the step after
it has these come anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ray_hetero.offload.weights.link_reader import SLOT_ALIGNMENT, Slot, slot_bytes
from ray_hetero.offload.weights.read_sequence import ReadSequence
from ray_hetero.offload.weights.weight_pieces import Piece


@dataclass(frozen=True, eq=False)
class IdleMemory:
    """Memory of a GPU that decode steps leave idle."""

    memory: torch.Tensor
    """uint8."""
    used: Any = None
    """Event: a stream beside that of products has done with it; None if there is no such stream."""
    free: Any = None
    """Event that this stream waits for before it writes again; None likewise."""
    before: int = 0
    """Bytes of the whole memory that this is the end of."""
    row_bytes: int = 0
    """Bytes of the whole memory, from its beginning on, that larger steps use for each token; 0
    where any of them uses all."""

    def spared(self, room: torch.Tensor) -> int:
        """Most tokens of a larger step that does not use a part of this memory."""
        if not self.row_bytes:
            return 0
        begin = int(room.data_ptr() - self.memory.data_ptr())
        return (self.before + begin) // self.row_bytes


@dataclass(frozen=True)
class _Places:
    """Where pieces of steps of one kind stay."""

    idle: Sequence[IdleMemory]
    slots: dict[Piece, Slot[Piece]]
    spared: dict[Piece, int]
    """Most tokens of a larger step that leaves a piece where it is."""


class ResidentPieces:
    """The pieces of steps of one kind that stay, and where.

    Args:
        module: that makes events.
        computing: the stream that products are computed on, and that larger steps write this memory
            on.

    """

    def __init__(self, module: Any, computing: Any) -> None:
        self._module = module
        self._computing = computing
        self._order: ReadSequence | None = None
        self._at = _Places((), {}, {})
        self._known: WeakKeyDictionary[ReadSequence, _Places] = WeakKeyDictionary()
        """Places of each order, the same whenever it comes again."""

    def begin(
        self, order: ReadSequence, pieces: Sequence[Piece],
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
                self._known[order] = self._places(pieces, memory())
            self._at = self._known[order]
        if self.is_complete:
            return
        for one in self._at.idle:
            if one.used is not None:
                self._computing.wait_event(one.used)
        for slot in self._at.slots.values():
            if slot.piece is None:
                # What comes here waits for the products that have used this memory up to now.
                slot.free.record(self._computing)

    def is_of(self, order: ReadSequence) -> bool:
        """Whether steps of this order were the last whose pieces may stay."""
        return self._order is order

    @property
    def is_complete(self) -> bool:
        """Whether all pieces that are to stay are there, or on their way."""
        return all(slot.piece is not None for slot in self._at.slots.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces that are to stay, as they are stored."""
        return sum(piece.weight.nbytes for piece in self._at.slots)

    def _places(self, pieces: Sequence[Piece], idle: Sequence[IdleMemory]) -> _Places:
        largest = max(piece.weight.nbytes for piece in pieces)
        rooms = [(room, one.spared(room)) for one in idle for room in _rooms(one.memory, largest)]
        # Those that the fewest prompts use come first.
        rooms.sort(key=lambda found: -found[1])
        count = min(len(rooms), len(pieces))
        # Evenly among all, so that the link has as much to do for each layer.
        chosen = [pieces[number * len(pieces) // count] for number in range(count)]
        places = _Places(idle, {}, {})
        for piece, (room, spared) in zip(chosen, rooms, strict=False):
            places.slots[piece] = Slot(room, self._module.Event(), self._module.Event())
            places.spared[piece] = spared
        return places

    def slot(self, piece: Piece) -> Slot[Piece] | None:
        """Memory of a piece that stays, which it may still have to be copied to."""
        return self._at.slots.get(piece)

    def has(self, piece: Piece) -> bool:
        """Whether a piece is there, or on its way."""
        slot = self._at.slots.get(piece)
        return slot is not None and slot.piece is not None

    def forget(self, tokens: int | None = None) -> None:
        """Evict the pieces whose memory is to be written for other purposes.

        Args:
            tokens: of the step that writes them; None for all pieces.

        """
        taken = [
            slot
            for piece, slot in self._at.slots.items()
            if slot.piece is not None and (tokens is None or tokens > self._at.spared[piece])
        ]
        for slot in taken:
            # A copy that is on its way would overwrite them.
            self._computing.wait_event(slot.ready)
            slot.piece = None
        for one in self._at.idle if taken else ():
            if one.free is not None:
                one.free.record(self._computing)


def _rooms(memory: torch.Tensor, nbytes: int) -> list[torch.Tensor]:
    """Memory for as many pieces as there is room for."""
    begin = -memory.data_ptr() % SLOT_ALIGNMENT
    step = slot_bytes(nbytes)
    count = max(0, len(memory) - begin) // step
    return list(memory[begin : begin + count * step].view(count, step))

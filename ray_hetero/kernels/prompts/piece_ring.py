"""Memory of a GPU for pieces of several sizes, which come and are used one after the other.

Pieces of a group's ranks are of 3 to 44 MB in an 8B model.  With a slot of the largest size for
each, half of the memory would hold nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Generic

import torch

from ray_hetero.kernels.prompts.link_reader import Read, Slot, slot_bytes


@dataclass(frozen=True, eq=False)
class _Place(Generic[Read]):
    """Where a piece is."""

    slot: Slot[Read]
    begin: int
    end: int


class PieceRing(Generic[Read]):
    """Memory that is given away and comes back in the same order.

    Args:
        memory: of the GPU, [bytes], uint8, aligned as slots are.
        module: that makes events.

    """

    def __init__(self, memory: torch.Tensor, module: Any) -> None:
        self._memory = memory
        self._size = len(memory)
        self._module = module
        self._places: deque[_Place[Read]] = deque()
        """Places that were given away, the oldest first."""
        self._end = 0
        """End of the last place that was given away, in bytes."""

    def has_room(self, nbytes: int, unread: Collection[Slot[Read]]) -> bool:
        """Whether there is memory for a piece where nobody is still to read what is there.

        Args:
            nbytes: of the piece.
            unread: slots of pieces that are still to be read.

        """
        return not any(place.slot in unread for place in self._in_the_way(self._begin(nbytes)))

    def take(self, nbytes: int, copying: Any) -> Slot[Read]:
        """Memory for a piece, which the copies that follow on a stream may be written to.

        Args:
            nbytes: of the piece, at most those of the memory.
            copying: the stream of copies; it waits until what was there before has been read.

        """
        begin, end = self._begin(nbytes)
        assert end <= self._size, (nbytes, self._size)
        slot = None
        for place in self._in_the_way((begin, end)):
            self._places.popleft()
            slot = place.slot
            copying.wait_event(slot.free)
        # A wait is for what was recorded before, so that events serve again.
        events = (slot.ready, slot.free) if slot else (self._module.Event(), self._module.Event())
        taken: Slot[Read] = Slot(self._memory[begin : begin + nbytes], *events)
        self._places.append(_Place(taken, begin, end))
        self._end = end
        return taken

    def wait(self, copying: Any) -> None:
        """Have a stream of copies wait until all that was here has been read; nothing is any more.

        Args:
            copying: the stream, which whatever comes here next is copied on.

        """
        for place in self._places:
            copying.wait_event(place.slot.free)
        self._places.clear()

    def _begin(self, nbytes: int) -> tuple[int, int]:
        """Where the next piece would begin and end, in whole slots."""
        size = slot_bytes(nbytes)
        begin = self._end if self._end + size <= self._size else 0
        return begin, begin + size

    def _in_the_way(self, place: tuple[int, int]) -> list[_Place[Read]]:
        """Places that are given back first where another one is given away, the oldest first."""
        begin, end = place
        is_around = begin < self._end
        found = []
        for one in self._places:
            is_left_behind = is_around and one.begin >= self._end
            if not is_left_behind and (one.end <= begin or end <= one.begin):
                break
            found.append(one)
        return found

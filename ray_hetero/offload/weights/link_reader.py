"""Reader of host memory: a GPU's copies on a stream of its own, each piece ahead of its use."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ray_hetero.kernels import step_trace
from ray_hetero.kernels.step_trace import Event

SLOT_ALIGNMENT = 512
"""Bytes that memory for a piece is a multiple of, as torch aligns what it takes of a GPU."""


def slot_bytes(nbytes: int) -> int:
    """Bytes of memory for pieces of up to so many bytes."""
    return -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


Read = TypeVar("Read")
"""Type of what a GPU reads at once."""


@dataclass(eq=False)
class Slot(Generic[Read]):
    """Memory on the GPU for one piece as it is stored."""

    memory: torch.Tensor
    """Bytes."""
    ready: Any
    """Event: the piece has come."""
    free: Any
    """Event: nothing reads it any more."""
    piece: Read | None = None


class LinkReader(ABC, Generic[Read]):
    """Reads pieces over the link on a stream of its own, each ahead of its use.

    Args:
        device: the GPU; for tests the CPU.
        module: that makes its streams and events.
        slots: pieces on the GPU.
        nbytes: of a slot.

    """

    def __init__(self, device: torch.device, module: Any, slots: int, nbytes: int) -> None:
        self.copying = module.Stream()
        """The stream of copies."""
        # In one, which torch rounds up once only.
        memory = torch.empty((slots, nbytes), dtype=torch.uint8, device=device)
        self.memory = memory.view(-1)
        """Memory of all slots, bytes."""
        self.all_slots: Sequence[Slot[Read]] = [
            Slot(one, module.Event(), module.Event()) for one in memory
        ]
        """Memory of the pieces that come ahead."""
        self._slots = itertools.cycle(self.all_slots)
        self._ahead: deque[Slot[Read]] = deque()

    @property
    def slots(self) -> int:
        """Pieces on the GPU at most."""
        return len(self.all_slots)

    @abstractmethod
    def copies(self, piece: Read) -> Iterator[tuple[torch.Tensor, int]]:
        """Bytes of a piece that are to be copied, and their places in a slot."""

    def forget(self) -> None:
        """Cancel the pieces that were requested ahead."""
        self._ahead.clear()

    def has_room(self, piece: Read) -> bool:
        """Whether a piece can be ordered beside those that are there, or on their way."""
        return len(self._ahead) < self.slots

    def slot_for(self, piece: Read) -> Slot[Read]:
        """Memory for a piece that is ordered now: that of the oldest one."""
        return next(self._slots)

    def fetch(self, piece: Read) -> None:
        """Order a piece."""
        slot = self.slot_for(piece)
        self.bring(piece, slot)
        self._ahead.append(slot)

    def bring(self, piece: Read, slot: Slot[Read]) -> None:
        """Order a piece into a slot, once nothing reads that any more."""
        with current(self.copying):
            self.copying.wait_event(slot.free)
            self.copy(piece, slot.memory)
            slot.ready.record(self.copying)
        slot.piece = piece

    def copy(self, piece: Read, memory: torch.Tensor) -> None:
        """Order the copies of a piece on the current stream, into the memory of a slot."""
        step_trace.note(Event.COPY, piece)
        for rows, at in self.copies(piece):
            memory[at : at + rows.numel()].copy_(rows, non_blocking=True)

    def read_ahead(self, last: Read, after: Callable[[Read], Read | None]) -> None:
        """Order what comes after the last piece that was ordered, as far as there is room.

        Args:
            last: that piece, where all have come.
            after: what comes after a piece, if that is known.

        """
        following = after((self._ahead[-1].piece or last) if self._ahead else last)
        while following is not None and self.has_room(following):
            self.fetch(following)
            following = after(following)


def current(stream: Any) -> AbstractContextManager[object]:
    """Make a stream the current one, without torch.cuda.stream, which the worker replaces too."""
    return stream if isinstance(stream, torch.Stream) else nullcontext()

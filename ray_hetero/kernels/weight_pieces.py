"""Weights that a GPU reads from host memory piece by piece, each ahead of its use.

A step multiplies by the same weights in the same order as the step before.  So what came after a
piece the last time is on its way over the link while the piece is computed with.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from ray_hetero.planning.prefill_memory import BF16_BYTES, SLOTS, piece_bytes
from ray_hetero.weight_formats.base import BLOCK, Expansion, HostWeight


@dataclass(eq=False)
class Piece:
    """Neighbouring blocks of a weight [outputs, inputs]."""

    weight: torch.Tensor
    """[end - begin, …] of `HostWeight.data`, in host memory."""
    begin: int
    end: int
    inputs: int
    expansion: Expansion
    after: Piece | None = None
    """The one that was computed with next the last time."""


def cut(weight: HostWeight, device: torch.device) -> Iterator[Piece]:
    """The pieces of a weight, in the order of its outputs.

    Args:
        weight: in host memory.
        device: what expands it.

    """
    outputs, inputs = weight.shape
    step = piece_bytes(inputs) // (BF16_BYTES * BLOCK * inputs) * BLOCK
    for begin in range(0, outputs, step):
        end = min(begin + step, outputs)
        expansion = weight.expansion(begin, end, device)
        yield Piece(weight.data[begin:end], begin, end, inputs, expansion)


class Following(Protocol):
    """What a GPU reads at once, and what it reads next."""

    after: Any
    """Another one, or None."""


Read = TypeVar("Read", bound=Following)


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
        self._copying = module.Stream()
        self._count = slots
        made: list[Slot[Read]] = [
            Slot(torch.empty(nbytes, dtype=torch.uint8, device=device), module.Event(),
                 module.Event())
            for _ in range(slots)
        ]  # fmt: skip
        self._slots = itertools.cycle(made)
        self._ahead: deque[Slot[Read]] = deque()

    @abstractmethod
    def copies(self, piece: Read) -> Iterator[tuple[torch.Tensor, int]]:
        """What of a piece is to be copied, as bytes, and to where in a slot."""

    def forget(self) -> None:
        """What was ordered ahead does not come."""
        self._ahead.clear()

    def fetch(self, piece: Read) -> None:
        """Order a piece."""
        slot = next(self._slots)
        with current(self._copying):
            self._copying.wait_event(slot.free)
            for rows, at in self.copies(piece):
                slot.memory[at : at + rows.numel()].copy_(rows, non_blocking=True)
            slot.ready.record(self._copying)
        slot.piece = piece
        self._ahead.append(slot)

    def read_ahead(self, last: Read) -> None:
        """Order what comes after the last piece that was ordered, as far as there are slots.

        Args:
            last: that piece, where all have come.

        """
        following = (self._ahead[-1].piece or last) if self._ahead else last
        while len(self._ahead) < self._count and following.after is not None:
            following = following.after
            self.fetch(following)


class PieceReader(LinkReader[Piece]):
    """Reads pieces over the link and expands them, on a stream of its own beside the products.

    Args:
        device: the GPU; for tests the CPU.
        module: that makes its streams and events.
        computing: the stream that products are computed on.
        inputs: most inputs of a weight.

    """

    def __init__(self, device: torch.device, module: Any, computing: Any, inputs: int) -> None:
        nbytes = piece_bytes(inputs)
        super().__init__(device, module, SLOTS, nbytes)
        self._computing = computing
        self._expanded = torch.empty(nbytes // BF16_BYTES, dtype=torch.bfloat16, device=device)
        self._last: Piece | None = None

    def copies(self, piece: Piece) -> Iterator[tuple[torch.Tensor, int]]:
        """All of it."""
        yield piece.weight.view(torch.uint8).view(-1), 0

    def expanded(self, piece: Piece) -> torch.Tensor:
        """The piece on the GPU, [outputs, inputs], bf16, in memory that the next one overwrites.

        The next ones are on their way then.
        """
        if self._last is not None:
            self._last.after = piece
        self._last = piece
        slot = self._slot_of(piece)
        self._computing.wait_event(slot.ready)
        rows, inputs = piece.end - piece.begin, piece.inputs
        weight = self._expanded[: rows * inputs]
        piece.expansion(slot.memory[: piece.weight.nbytes], weight)
        slot.free.record(self._computing)
        self.read_ahead(piece)
        return weight.view(rows, inputs)

    def _slot_of(self, piece: Piece) -> Slot[Piece]:
        # Pieces that were expected and did not come are passed over.
        while self._ahead:
            slot = self._ahead.popleft()
            if slot.piece is piece:
                return slot
        self.fetch(piece)
        return self._ahead.popleft()


def current(stream: Any) -> AbstractContextManager[object]:
    """Make a stream the current one, without torch.cuda.stream, which the worker replaces too."""
    return stream if isinstance(stream, torch.Stream) else nullcontext()

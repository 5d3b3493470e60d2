"""Weights that a GPU reads from host memory piece by piece, each ahead of its use.

A step multiplies by the same weights in the same order as the step before.  So what came after a
piece the last time is on its way over the link while the piece is computed with.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

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


@dataclass(eq=False)
class _Slot:
    """Memory on the GPU for one piece."""

    memory: torch.Tensor
    """Bytes."""
    ready: Any
    """Event: the piece has come."""
    free: Any
    """Event: nothing reads it any more."""
    piece: Piece | None = None


class PieceReader:
    """Reads pieces over the link and expands them, on a stream of its own beside the products.

    Args:
        device: the GPU; for tests the CPU.
        module: that makes its streams and events.
        computing: the stream that products are computed on.
        inputs: most inputs of a weight.

    """

    def __init__(self, device: torch.device, module: Any, computing: Any, inputs: int) -> None:
        self._computing, self._copying = computing, module.Stream()
        elements = piece_bytes(inputs) // BF16_BYTES

        def memory() -> torch.Tensor:
            return torch.empty(elements, dtype=torch.bfloat16, device=device)

        slots = [
            _Slot(memory().view(torch.uint8), module.Event(), module.Event()) for _ in range(SLOTS)
        ]
        self._slots = itertools.cycle(slots)
        self._expanded = memory()
        self._ahead: deque[_Slot] = deque()
        self._last: Piece | None = None

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
        self._read_ahead()
        return weight.view(rows, inputs)

    def _slot_of(self, piece: Piece) -> _Slot:
        # Pieces that were expected and did not come are passed over.
        while self._ahead:
            slot = self._ahead.popleft()
            if slot.piece is piece:
                return slot
        self._fetch(piece)
        return self._ahead.popleft()

    def _read_ahead(self) -> None:
        """Order what came after this piece the last time, as far as there are slots."""
        last = self._ahead[-1].piece if self._ahead else self._last
        while len(self._ahead) < SLOTS and last is not None and last.after is not None:
            last = last.after
            self._fetch(last)

    def _fetch(self, piece: Piece) -> None:
        slot = next(self._slots)
        with current(self._copying):
            self._copying.wait_event(slot.free)
            sent = piece.weight.view(torch.uint8).view(-1)
            slot.memory[: sent.numel()].copy_(sent, non_blocking=True)
            slot.ready.record(self._copying)
        slot.piece = piece
        self._ahead.append(slot)


def current(stream: Any) -> AbstractContextManager[object]:
    """Make a stream the current one, without torch.cuda.stream, which the worker replaces too."""
    return stream if isinstance(stream, torch.Stream) else nullcontext()

"""Shared decode steps whose work on the GPU is ordered in one call.

Copies, expansions and products of a step's pieces are some hundred operations, and ordering each
anew takes a core 10 to 30 ms a step, on hosts whose cores compute as well.  As a step of as many
tokens repeats the last one but for the contents of memory, it is captured into a CUDA graph; a few
numbers of tokens serve for all (mlp_columns.py).  In a graph every piece has its place: some
stay on the GPU (resident_pieces.py), and the others take turns in the memory of pieces that come
ahead, where a step leaves the first ones of the next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels import step_trace
from ray_hetero.kernels.layers.layer_parts import CpuBlocks
from ray_hetero.kernels.step_trace import Event
from ray_hetero.log import logger
from ray_hetero.offload.prefill.offload_gpu import OffloadGpu
from ray_hetero.offload.weights.link_reader import Slot, current
from ray_hetero.offload.weights.weight_pieces import Piece
from ray_hetero.runtime.stream_graph import Graph, captured

MOST_GRAPHS = 48
"""Graphs at a time, each of some hundred kilobytes."""

Expand = Callable[[Piece, torch.Tensor], None]
"""Orders the expansion of a piece into memory [outputs, inputs] on the stream of products."""


@dataclass(frozen=True)
class StepKind:
    """Kind of a step's work on the GPU; each kind has a graph of its own."""

    tokens: int
    """Tokens that the GPU computes, at least those of the step."""
    kept: CpuBlocks
    """Blocks that the cores compute."""
    first: int
    """Layers that count as asked for before the step."""


Order = Callable[[StepKind, Expand], None]
"""Orders a step's work, in which pieces are expanded as it is given."""


class PiecePlaces:
    """Where the pieces of a step are in each of its graphs.

    Args:
        gpu: that has the pieces.
        pieces: of a step, in their order.

    """

    def __init__(self, gpu: OffloadGpu, pieces: Sequence[Piece]) -> None:
        self._gpu = gpu
        self._stay = {piece: slot for piece in pieces
                      if (slot := gpu.reader.kept.slot(piece)) is not None}  # fmt: skip
        self.moving = [piece for piece in pieces if gpu.reader.kept.slot(piece) is None]
        """Pieces that take turns."""
        self.slots = gpu.reader.all_slots[: len(self.moving)]
        """Memory that they take turns in."""
        self._have_come = False
        """Whether all pieces have been where a graph expects them since they were brought there."""

    def begin(self) -> bool:
        """Bring all pieces to where a graph expects them at its beginning.

        Returns:
            whether that can be: not where a piece that is to stay has to come first.

        """
        reader = self._gpu.reader
        if not reader.kept.is_complete:
            return False
        if reader.lend(self):
            self._have_come = False
            for slot, piece in zip(self.slots, self.moving, strict=False):
                reader.bring(piece, slot)
            for slot in self._all:
                self._gpu.computing.wait_event(slot.ready)
        return True

    def fetch(self) -> int:
        """Prefetch pieces that are not where a graph expects them; returns bytes on their way."""
        for piece, slot in self._stay.items():
            if slot.piece is None:
                self._gpu.reader.bring(piece, slot)
                self._gpu.computing.wait_event(slot.ready)
                self._have_come = False
        self.begin()
        if self._have_come:
            return 0
        coming = sum(int(slot.memory.nbytes) for slot in self._all if not slot.ready.query())
        self._have_come = not coming
        return coming

    @property
    def _all(self) -> list[Slot[Piece]]:
        return [*self.slots, *self._stay.values()]


class PiecesInTurns:
    """The pieces of one step, each expanded from its place, whose copies are ordered with it.

    Args:
        gpu: that has the pieces.
        places: of them.

    """

    def __init__(self, gpu: OffloadGpu, places: PiecePlaces) -> None:
        self._gpu, self._reader, self._places = gpu, gpu.reader, places
        self._used = 0
        self._ready: dict[int, Any] = {}
        """Events of the copies, by the number of a piece among those that take turns."""

    def expand(self, piece: Piece, into: torch.Tensor) -> None:
        """Expand the next piece, as `Expand` says; what takes its place is on its way then."""
        stays = self._reader.kept.slot(piece)
        if stays is not None:
            piece.expansion(stays.memory[: piece.weight.nbytes], into.view(-1))
            return
        moving, slots = self._places.moving, self._places.slots
        number, self._used = self._used, self._used + 1
        assert moving[number] is piece
        place = number % len(slots)
        if number in self._ready:
            self._gpu.computing.wait_event(self._ready[number])
        piece.expansion(slots[place].memory[: piece.weight.nbytes], into.view(-1))
        if len(slots) == len(moving):
            return  # each has memory of its own
        following = number + len(slots)
        # Behind the last one come the first ones of the next step.
        coming = moving[following if following < len(moving) else place]
        self._copy_behind(coming, slots[place].memory, following)

    def _copy_behind(self, coming: Piece, memory: torch.Tensor, number: int) -> None:
        copying = self._reader.copying
        free, ready = self._gpu.event(), self._gpu.event()
        free.record(self._gpu.computing)
        copying.wait_event(free)
        with current(copying):
            self._reader.copy(coming, memory)
            ready.record(copying)
        self._ready[number] = ready

    def end(self) -> None:
        """Make the stream of products wait for all copies, of which the last one ends last."""
        if self._ready:
            self._gpu.computing.wait_event(self._ready[max(self._ready)])


class StepGraphs:
    """Graphs of the steps that came again.

    Args:
        gpu: that computes them.

    """

    def __init__(self, gpu: OffloadGpu) -> None:
        self._gpu = gpu
        self._graphs: OrderedDict[StepKind, Graph] = OrderedDict()
        self._places: dict[CpuBlocks, PiecePlaces] = {}
        """Places of the pieces of a step, by the blocks that the cores compute."""
        self._last: StepKind | None = None
        self._is_refused = False
        self.replayed = 0
        """Steps up to now that were ordered in one call."""

    @property
    def kinds(self) -> tuple[StepKind, ...]:
        """Kinds of steps that there are graphs of."""
        return tuple(self._graphs)

    def has(self, kind: StepKind) -> bool:
        """Whether there is a graph of a step of this kind."""
        return kind in self._graphs

    def fetch(self, kind: StepKind) -> int:
        """Prefetch the pieces of a step that has a graph; returns bytes that are on their way.

        Within inference mode and on the stream of products, once the pieces have places to stay.
        """
        return self._places[kind.kept].fetch()

    def replay(self, kind: StepKind) -> bool:
        """Order a step's work in one call, within inference mode and on the stream of products.

        Returns:
            whether that has been done: not where there is no graph of it, or pieces that are to
            stay have to come first.

        """
        graph = self._graphs.get(kind)
        if graph is None or not self._places[kind.kept].begin():
            return False
        self._last = kind
        self._graphs.move_to_end(kind)
        step_trace.note(Event.GRAPH, "replayed", kind)
        graph.replay()
        self.replayed += 1
        return True

    def note(self, kind: StepKind, pieces: Sequence[Piece], order: Order) -> None:
        """Note that a step has been ordered; where it is like the last one, capture it.

        Args:
            kind: of the step.
            pieces: of it, in their order.
            order: orders its work.

        """
        last, self._last = self._last, kind
        if last is not None and (last.tokens, last.kept) == (kind.tokens, kind.kept):
            self.capture(kind, pieces, order)

    def capture(self, kind: StepKind, pieces: Sequence[Piece], order: Order) -> None:
        """Make a graph of a step of a kind whose work was ordered before, unless there is one.

        Arguments as of `note`.
        """
        if kind in self._graphs or self._is_refused:
            return
        if kind.kept not in self._places:
            self._places[kind.kept] = PiecePlaces(self._gpu, pieces)
        places = self._places[kind.kept]

        def work() -> None:
            turns = PiecesInTurns(self._gpu, places)
            order(kind, turns.expand)
            turns.end()

        try:
            beside = next(iter(self._graphs.values()), None)
            self._graphs[kind] = captured(work, self._gpu.device, beside)
            step_trace.note(Event.GRAPH, "captured", kind)
        except UnsupportedError as error:
            self._is_refused = True
            logger.warning(
                "operations of the GPU's part of a decode step are ordered one by one, which takes "
                "a core some milliseconds of each step: CUDA cannot capture them (%s)",
                error,
            )
        while len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)

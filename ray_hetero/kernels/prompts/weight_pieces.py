"""Weights that a GPU reads from host memory piece by piece, each ahead of its use.

A step multiplies by the same weights in the same order as the last step of its kind.  So what came
after a piece then is on its way over the link while the piece is computed with.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ray_hetero.kernels.formats.base import BLOCK, Expansion
from ray_hetero.kernels.prompts.link_reader import LinkReader, Slot, current
from ray_hetero.planning.prefill_memory import BF16_BYTES, EXPANDED, piece_bytes, slots_within

SLOT_ALIGNMENT = 512
"""Bytes that memory for a piece is a multiple of, as torch aligns what it takes of a GPU."""
TILE_OUTPUTS = 256
"""Outputs of one tile of a GPU's product, or of two: parts of a tile cost as much."""


class Source(Protocol):
    """A weight that a GPU reads: of this process, or of one that shares it."""

    @property
    def data(self) -> torch.Tensor:
        """[N, …], contiguous, in host memory; see `HostWeight.data`."""

    @property
    def shape(self) -> tuple[int, int]:
        """N, K."""

    @property
    def gpu_bytes(self) -> int:
        """Memory of a GPU that its expansions take all together."""

    def expansion(self, begin: int, end: int, device: torch.device) -> Expansion:
        """How a GPU expands outputs `begin` to `end`, multiples of 32."""


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a weight whose rest other ranks hold."""

    source: Source
    outputs: tuple[tuple[int, int, int], ...]
    """Outputs of the part in runs: first, last, and where the first is among those of the whole."""
    inputs: int = 0
    """Place of the part's first input among those of the whole."""
    is_added: bool = False
    """Whether its products are added to those of parts before."""


@dataclass(frozen=True, eq=False)
class WholeWeight:
    """A weight in parts that one or more ranks hold."""

    parts: tuple[Part, ...]
    shape: tuple[int, int]
    """N, K of the whole."""

    @property
    def data(self) -> torch.Tensor:
        """Data of the first part, by which the weight is known."""
        return self.parts[0].source.data

    @property
    def nbytes(self) -> int:
        """Bytes of all parts in host memory."""
        return sum(part.source.data.nbytes for part in self.parts)

    @property
    def gpu_bytes(self) -> int:
        """Memory of a GPU that its expansions take all together."""
        return sum(part.source.gpu_bytes for part in self.parts)

    @staticmethod
    def parts_of(weight: Source | WholeWeight) -> tuple[Part, ...]:
        """The parts of a weight of one rank, or of several."""
        whole = weight if isinstance(weight, WholeWeight) else WholeWeight.of_one(weight)
        return whole.parts

    @classmethod
    def of_one(cls, weight: Source) -> WholeWeight:
        """A weight that is in one part."""
        return cls.by_columns([weight], [weight.shape[0]])

    @classmethod
    def by_columns(cls, ranks: Sequence[Source], sizes: Sequence[int]) -> WholeWeight:
        """What ranks hold some outputs of each (column parallel).

        Args:
            ranks: their weights, alike in shape.
            sizes: outputs of a rank that belong together, one after the other: those of queries, of
                keys and of values; multiples of 32.  In the whole, all ranks' of one kind are
                neighbours.

        """
        outputs, inputs = ranks[0].shape
        assert sum(sizes) == outputs, (sizes, outputs)
        assert not any(size % BLOCK for size in sizes), sizes
        begins = list(itertools.accumulate(sizes, initial=0))
        parts = [
            Part(
                weight,
                tuple(
                    (begin, begin + size, len(ranks) * begin + own * size)
                    for begin, size in zip(begins, sizes, strict=False)
                ),
            )
            for own, weight in enumerate(ranks)
        ]
        return cls(tuple(parts), (len(ranks) * outputs, inputs))

    @classmethod
    def by_rows(cls, ranks: Sequence[Source]) -> WholeWeight:
        """What ranks hold some inputs of each (row parallel), alike in shape."""
        outputs, inputs = ranks[0].shape
        parts = [
            Part(weight, ((0, outputs, 0),), own * inputs, is_added=own > 0)
            for own, weight in enumerate(ranks)
        ]
        return cls(tuple(parts), (outputs, len(ranks) * inputs))


@dataclass(eq=False)
class Piece:
    """Neighbouring blocks of a weight [outputs, inputs]."""

    weight: torch.Tensor
    """[end - begin, …] of `HostWeight.data`, in host memory."""
    begin: int
    end: int
    inputs: int
    expansion: Expansion

    @property
    def values(self) -> int:
        """Weights of the piece."""
        return (self.end - self.begin) * self.inputs


@dataclass(frozen=True, eq=False)
class Placed:
    """A piece of a whole weight."""

    piece: Piece
    outputs: slice
    """Outputs of the piece among those of the whole."""
    inputs: slice
    is_added: bool
    """Whether its products are added to those of pieces before."""


def cut(
    whole: WholeWeight, device: torch.device, most_outputs: int | None = None
) -> Iterator[Placed]:
    """The pieces of a weight, part by part in the order of its outputs.

    Args:
        whole: in host memory.
        device: what expands it.
        most_outputs: of a piece, a multiple of 32; None for as many as a piece has room for.

    """
    for part in whole.parts:
        weight, inputs = part.source, part.source.shape[1]
        most = most_outputs or piece_bytes(inputs) // (BF16_BYTES * BLOCK * inputs) * BLOCK
        columns = slice(part.inputs, part.inputs + inputs)
        for first, last, place in part.outputs:
            step = piece_outputs(last - first, most)
            for begin in range(first, last, step):
                end = min(begin + step, last)
                expansion = weight.expansion(begin, end, device)
                piece = Piece(weight.data[begin:end], begin, end, inputs, expansion)
                rows = slice(place + begin - first, place + end - first)
                yield Placed(piece, rows, columns, part.is_added)


def piece_outputs(outputs: int, most: int) -> int:
    """Outputs of each of as few pieces as there can be, which are as alike as tiles allow.

    Args:
        outputs: of all pieces, a multiple of 32.
        most: of a piece, a multiple of 32.

    """
    even = -(-outputs // -(-outputs // most))
    tiles, blocks = (-(-even // unit) * unit for unit in (TILE_OUTPUTS, BLOCK))
    return tiles if tiles <= most else blocks


class ReadingOrder:
    """The order in which steps of one kind use pieces, as the last one of them did.

    Steps of different kinds use different pieces, each with other ones after it; in one order for
    all, each step would be taken for a step of the kind before it.
    """

    def __init__(self) -> None:
        self._after: dict[Piece, Piece] = {}
        self.last: Piece | None = None
        """The one that was used last; None where what comes next does not follow it."""

    def use(self, piece: Piece) -> None:
        """Note that a piece is used, after the last one."""
        if self.last is not None:
            self._after[self.last] = piece
        self.last = piece

    def after(self, piece: Piece) -> Piece | None:
        """What was used after a piece the last time, if anything was."""
        return self._after.get(piece)

    def interrupt(self) -> None:
        """Have what comes next follow nothing; all that is known stays."""
        self.last = None


@dataclass(eq=False)
class _Buffer:
    """Memory on the GPU for one expanded piece."""

    memory: torch.Tensor
    """bf16."""
    ready: Any
    """Event: the piece is expanded."""
    free: Any
    """Event: products with what was in it before have ended."""
    piece: Piece | None = None


class PieceReader(LinkReader[Piece]):
    """Reads pieces over the link and expands them, each on a stream of its own beside the products.

    There is memory for two expanded pieces.  While products are computed with one, the next is
    expanded in the other, on processors that the products leave idle.

    Args:
        device: the GPU; for tests the CPU.
        module: that makes its streams and events.
        computing: the stream that products are computed on.
        pieces: all of them.
        budget: bytes for those that come ahead.

    """

    def __init__(
        self, device: torch.device, module: Any, computing: Any, pieces: Sequence[Piece],
        budget: int,
    ) -> None:  # fmt: skip
        self.stored = max(piece.weight.nbytes for piece in pieces)
        """Most bytes of a piece as it is stored."""
        slot = -(-self.stored // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        super().__init__(device, module, slots_within(budget, slot, len(pieces)), slot)
        self._computing = computing
        # Ahead of products, whose end it does not put off: the next ones wait for it.
        self._expanding = module.Stream(priority=-1)
        self.values = max(piece.values for piece in pieces)
        """Most weights of a piece."""
        memory = torch.empty((EXPANDED, self.values), dtype=torch.bfloat16, device=device)
        made = [_Buffer(one, module.Event(), module.Event()) for one in memory]
        self._used, self._next = made

    def copies(self, piece: Piece) -> Iterator[tuple[torch.Tensor, int]]:
        """All of it."""
        yield piece.weight.view(torch.uint8).view(-1), 0

    def forget(self) -> None:
        """What was ordered ahead does not come, and nothing is expanded."""
        super().forget()
        self._used.piece = self._next.piece = None

    def wait(self) -> None:
        """Wait until all pieces that were ordered have come, and the next one is expanded."""
        super().wait()
        self._next.ready.synchronize()

    def expanded(self, piece: Piece, order: ReadingOrder, *, is_next_too: bool) -> torch.Tensor:
        """The piece on the GPU, [outputs, inputs], bf16; the next ones are on their way then.

        The memory is overwritten once products are ordered with the piece after this one.

        Args:
            piece: of one of the weights.
            order: of steps of the kind that uses it.
            is_next_too: whether the next piece is expanded while this one is computed with; not
                where that is to be expanded into other memory.

        """
        order.use(piece)
        # Products with the last piece are all ordered by now.
        self._used.free.record(self._computing)
        self._used, self._next = self._next, self._used
        if self._used.piece is not piece:
            self._expand(self._used, piece)
        self._computing.wait_event(self._used.ready)
        last, following = piece, order.after(piece)
        if is_next_too and following is not None and following is not piece:
            self._expand(self._next, following)
            last = following
        self.read_ahead(last, order.after)
        return self._used.memory[: piece.values].view(-1, piece.inputs)

    def expand_into(self, piece: Piece, order: ReadingOrder, into: torch.Tensor) -> None:
        """Expand a piece on the stream of products; the next ones are on their way then.

        Args:
            piece: as of `expanded`.
            order: the same.
            into: where it is expanded to, [outputs, inputs], contiguous.

        """
        order.use(piece)
        self._expand_slot(self._slot_of(piece), piece, into, self._computing)
        self.read_ahead(piece, order.after)

    def prepare(self, order: ReadingOrder) -> None:
        """Order what the next step of a kind uses first, where all slots are left free."""
        if not self._ahead and order.last is not None:
            last, first = order.last, order.after(order.last)
            if first is not None and first is self._next.piece:
                last = first  # it is expanded already
            self.read_ahead(last, order.after)

    def _expand(self, buffer: _Buffer, piece: Piece) -> None:
        with current(self._expanding):
            self._expanding.wait_event(buffer.free)
            into = buffer.memory[: piece.values]
            self._expand_slot(self._slot_of(piece), piece, into, self._expanding)
            buffer.ready.record(self._expanding)
        buffer.piece = piece

    def _expand_slot(
        self, slot: Slot[Piece], piece: Piece, into: torch.Tensor, stream: Any
    ) -> None:
        stream.wait_event(slot.ready)
        piece.expansion(slot.memory[: piece.weight.nbytes], into.view(-1))
        slot.free.record(stream)

    def _slot_of(self, piece: Piece) -> Slot[Piece]:
        # Pieces that were expected and did not come are passed over.
        while self._ahead:
            slot = self._ahead.popleft()
            if slot.piece is piece:
                return slot
        self.fetch(piece)
        return self._ahead.popleft()

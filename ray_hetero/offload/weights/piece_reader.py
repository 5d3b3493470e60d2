"""Pieces of weights on their way to a GPU, and their expansion there.

A step multiplies by the same weights in the same order as the last step of its kind.  So what came
after a piece then is on its way over the link while the piece is computed with.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

import torch

from ray_hetero.offload.weights.link_reader import LinkReader, Read, Slot, current, slot_bytes
from ray_hetero.offload.weights.read_sequence import ReadSequence
from ray_hetero.offload.weights.resident_pieces import IdleMemory, ResidentPieces
from ray_hetero.offload.weights.weight_pieces import Piece
from ray_hetero.planning.prefill_memory import EXPANDED, slots_within


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
        """Make a stream of copies wait until all pieces here have been read, and forget them.

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


ROUNDS = 3
"""Times that copies and products are measured, of which the shortest counts."""


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

    There is memory for three expanded pieces.  While products are computed with one, the next is
    there, and the one behind it is expanded on processors that the products leave idle.  With
    memory for two, products on an H100 waited up to 0.03 ms for the end of each expansion.

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
        self.largest = max(pieces, key=lambda piece: piece.values)
        """The piece with most weights."""
        self.stored = max(piece.weight.nbytes for piece in pieces)
        """Most bytes of a piece as it is stored."""
        slot = slot_bytes(self.stored)
        super().__init__(device, module, slots_within(budget, slot, len(pieces)), slot)
        self._most = len(pieces)
        self._ring: PieceRing[Piece] = PieceRing(self.memory, module)
        """The memory of slots, for as many pieces as it holds."""
        self._returned = module.Event()
        self._computing = computing
        # Not ahead of products: prompts of 128 to 32,768 tokens took up to 2 % longer on an H100.
        self._expanding = module.Stream()
        self.kept = ResidentPieces(module, computing)
        """Pieces that do not come again for each step."""
        self._lent_to: object | None = None
        self.values = self.largest.values
        """Most weights of a piece."""
        memory = torch.empty((EXPANDED, self.values), dtype=torch.bfloat16, device=device)
        self._buffers = deque(_Buffer(one, module.Event(), module.Event()) for one in memory)
        """Memory of expanded pieces: of that which is computed with, and of those behind it."""

    def copies(self, piece: Piece) -> Iterator[tuple[torch.Tensor, int]]:
        """All of it."""
        yield piece.stored, 0

    def forget(self) -> None:
        """Cancel the pieces that were requested ahead, and forget those that are expanded."""
        super().forget()
        self.kept.forget()
        self._forget_expanded()

    def _forget_expanded(self) -> None:
        for buffer in self._buffers:
            buffer.piece = None

    def expanded(self, piece: Piece, order: ReadSequence) -> torch.Tensor:
        """The piece on the GPU, [outputs, inputs], bf16; the next ones are on their way then.

        The memory is overwritten once products are ordered with the piece after this one.

        Args:
            piece: of one of the weights.
            order: of steps of the kind that uses it.

        """
        order.use(piece)
        # Products with the last piece are all ordered by now.
        self._buffers[0].free.record(self._computing)
        self._buffers.rotate(-1)
        used = self._buffers[0]
        if used.piece is not piece:
            self._expand(used, piece)
        self._computing.wait_event(used.ready)
        last = piece
        for buffer, following in self._places_behind(piece, order):
            if buffer.piece is not following:
                self._expand(buffer, following)
            last = following
        self._read_ahead(last, order)
        return used.memory[: piece.values].view(-1, piece.inputs)

    def expand_into(self, order: ReadSequence, piece: Piece, into: torch.Tensor) -> None:
        """Expand a piece on the stream of products; the next ones are on their way then.

        Args:
            order: as of `expanded`.
            piece: the same.
            into: where it is expanded to, [outputs, inputs], contiguous.

        """
        order.use(piece)
        self._expand_slot(self._slot_of(piece), piece, into, self._computing)
        self._read_ahead(piece, order)

    def prepare_next(self, order: ReadSequence) -> None:
        """Order what the next step uses first, and expand the first pieces.

        That comes in the place of what steps of other kinds would use, and of pieces that stay
        where every larger step has something else.

        Args:
            order: of steps of its kind.

        """
        last = order.last
        if last is None or order.after(last) is None:
            return
        for buffer, following in self._places_behind(last, order):
            if buffer.piece is not following:
                self.kept.forget(1)
                self._expand(buffer, following)
            last = following
        if self._ahead and self._ahead[0].piece is not order.after(last):
            self._ahead.clear()
        self._read_ahead(last, order)

    def _places_behind(self, piece: Piece, order: ReadSequence) -> Iterator[tuple[_Buffer, Piece]]:
        """Memory for what is expanded behind a piece, and what that is, as far as it is known."""
        following: Piece | None = piece
        for buffer in itertools.islice(self._buffers, 1, None):
            following = None if following is None else order.after(following)
            if following is None or following is piece:
                return
            yield buffer, following

    def seconds(self, multiply: Callable[[torch.Tensor], None]) -> tuple[float, float]:
        """Seconds that the largest piece takes over the link, and that products with it take.

        What was ordered ahead does not come then.

        Args:
            multiply: orders products with a piece, [outputs, inputs], on the stream of products.

        """
        slot, link = self._link_seconds()
        piece, buffer = self.largest, self._buffers[1]
        weight = buffer.memory[: piece.values]
        self._expand_slot(slot, piece, weight, self._computing)
        buffer.ready.record(self._computing)
        buffer.ready.synchronize()

        def products() -> None:
            multiply(weight.view(-1, piece.inputs))
            buffer.ready.record(self._computing)

        return link, _fastest(products, buffer.ready)

    def link_rate(self) -> float:
        """Bytes a second over the link; what was ordered ahead does not come then."""
        _, taken = self._link_seconds()
        return float(self.largest.weight.nbytes / taken)

    def _link_seconds(self) -> tuple[Slot[Piece], float]:
        self.forget()
        self._take_back()
        piece = self.largest
        slot = self._ring.take(piece.weight.nbytes, self.copying)
        return slot, _fastest(lambda: self.bring(piece, slot), slot.ready)

    def slot_for(self, piece: Piece) -> Slot[Piece]:
        """Memory for a piece: where it stays, or that of the oldest one."""
        stays = self.kept.slot(piece)
        if stays is not None:
            return stays
        self._take_back()
        return self._ring.take(piece.weight.nbytes, self.copying)

    def has_room(self, piece: Piece) -> bool:
        """Whether a piece can be ordered beside those that are there, or on their way."""
        if len(self._ahead) >= self._most:
            return False
        stays = self.kept.slot(piece) is not None
        return stays or self._ring.has_room(piece.weight.nbytes, self._ahead)

    def idle(self) -> list[IdleMemory]:
        """Memory for expanded pieces, which steps leave idle that expand into other memory."""
        return [
            IdleMemory(one.memory.view(torch.uint8), one.ready, one.free) for one in self._buffers
        ]

    def keep(
        self, order: ReadSequence, pieces: Sequence[Piece],
        memory: Callable[[], Sequence[IdleMemory]],
    ) -> None:  # fmt: skip
        """Begin a step whose pieces may stay; arguments as of `ResidentPieces.begin`."""
        self.kept.begin(order, pieces, memory)
        if not self.kept.is_complete:
            # They may come to what is `idle`.
            self._forget_expanded()

    def lend(self, to: object) -> bool:
        """Lend the memory of pieces that come ahead, until the next one is fetched there.

        Args:
            to: whose steps say themselves what is in it.

        Returns:
            whether there may be other things in it than these steps have left.

        """
        if self._lent_to is to:
            return False
        self._take_back()
        # What was ordered ahead comes, and is not looked for.
        self._ahead.clear()
        self._ring.wait(self.copying)
        self._lent_to = to
        return True

    def _take_back(self) -> None:
        if self._lent_to is not None:
            self._lent_to = None
            # All that was there has been used by what this stream has been given up to now.
            self._returned.record(self._computing)
            self.copying.wait_event(self._returned)

    def _read_ahead(self, last: Piece, order: ReadSequence) -> None:
        self.read_ahead(last, partial(order.after, but=self.kept.has))

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
        kept = self.kept.slot(piece)
        if kept is not None and kept.piece is not None and kept not in self._ahead:
            return kept  # since an earlier step
        # Pieces that were expected and did not come are passed over.
        while self._ahead:
            slot = self._ahead.popleft()
            if slot.piece is piece:
                return slot
        self.fetch(piece)
        return self._ahead.popleft()


def _fastest(order: Callable[[], None], done: Any) -> float:
    """Seconds of the fastest round, until an event that it has recorded."""
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        order()
        done.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken)

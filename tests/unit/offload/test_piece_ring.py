"""Memory for pieces of several sizes, which come and are used in the same order."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ray_hetero.offload.weights.link_reader import SLOT_ALIGNMENT, Slot  # noqa: E402
from ray_hetero.offload.weights.piece_reader import PieceRing  # noqa: E402

KIB = 1024


class Event:
    """An event of which only the waits count."""


class Copying:
    """A stream that notes what it waits for."""

    def __init__(self) -> None:
        self.waited: list[Event] = []

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)


def ring(nbytes: int) -> tuple[PieceRing[Any], Copying]:
    return PieceRing(
        torch.zeros(nbytes, dtype=torch.uint8), SimpleNamespace(Event=Event)
    ), Copying()


def test_what_is_unread_stays_and_what_was_read_is_waited_for() -> None:
    numbers = random.Random(0)
    for _ in range(50):
        pieces, copying = ring(64 * KIB)
        unread: deque[Slot[Any]] = deque()
        there: deque[Slot[Any]] = deque()
        for _ in range(300):
            nbytes = numbers.randrange(1, 24 * KIB)
            while not pieces.has_room(nbytes, unread):
                unread.popleft()
            copying.waited.clear()
            before = [(slot, slot.free) for slot in there]
            slot = pieces.take(nbytes, copying)
            own = {slot.memory.data_ptr() + at for at in (0, nbytes - 1)}
            assert slot.memory.numel() == nbytes
            assert not slot.memory.storage_offset() % SLOT_ALIGNMENT
            for one, free in before:
                begin, end = one.memory.data_ptr(), one.memory.data_ptr() + one.memory.numel()
                inside = {at for at in own if begin <= at < end}
                overlaps = inside or min(own) <= begin < max(own)
                assert not (overlaps and any(one is other for other in unread))
                if overlaps:
                    assert free in copying.waited
            while there and there[0].free in copying.waited:
                there.popleft()
            there.append(slot)
            unread.append(slot)
            # Some are read at once, others later.
            for _ in range(numbers.randrange(2)):
                unread.popleft()


def test_small_pieces_leave_room_for_more() -> None:
    def count(sizes: list[int]) -> int:
        pieces, copying = ring(64 * KIB)
        unread: list[Slot[Any]] = []
        for nbytes in sizes:
            if not pieces.has_room(nbytes, unread):
                break
            unread.append(pieces.take(nbytes, copying))
        return len(unread)

    assert count([16 * KIB] * 9) == 4
    assert count([16 * KIB, *[2 * KIB] * 90]) == 1 + 24
    assert count([64 * KIB] * 2) == 1


def test_nothing_is_there_once_all_was_waited_for() -> None:
    pieces, copying = ring(64 * KIB)
    slots = [pieces.take(16 * KIB, copying) for _ in range(4)]
    assert not copying.waited
    pieces.wait(copying)
    assert copying.waited == [slot.free for slot in slots]
    copying.waited.clear()
    pieces.take(64 * KIB, copying)
    assert not copying.waited

"""How readers of vLLM's message queues wait for the next message."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from ray_hetero.compat.worker import message_queues
from ray_hetero.compat.worker.message_queues import FIRST_NAP_S, LONGEST_NAP_S, POLLED_SHARE


class Waits:
    """A queue with a reader, and what the reader does at given times since the last message.

    Args:
        monkeypatch: has a clock that stands still, and notes naps and polls.
        naps_always: see `nap_while_waiting`.

    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, naps_always: bool) -> None:
        self.writer = MessageQueue(n_reader=1, n_local_reader=1)
        self.reader = MessageQueue.create_from_handle(self.writer.export_handle(), 0)
        self._found: list[float | str] = []
        self._now = time.monotonic()
        message_queues.nap_while_waiting(self.reader, naps_always=naps_always)
        clock = SimpleNamespace(monotonic=lambda: self._now, sleep=self._found.append)
        monkeypatch.setattr(message_queues, "time", clock)
        monkeypatch.setattr(shm_broadcast.time, "monotonic", lambda: self._now)
        monkeypatch.setattr(shm_broadcast, "sched_yield", lambda: self._found.append("poll"))

    def at(self, seconds: float) -> float | str:
        """What it does so long after the last message: the length of a nap, or a poll."""
        self._now = self.reader._spin_condition.last_read + seconds
        self._found.clear()
        self.reader._spin_condition.wait()
        (found,) = self._found
        return found

    def message(self, seconds: float) -> None:
        """Have the next message come, so long after the last one."""
        self._now = self.reader._spin_condition.last_read + seconds
        self.writer.enqueue("an answer")
        assert self.reader.dequeue() == "an answer"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes `Waits`, and closes their queues."""
    made: list[Waits] = []

    def make(*, naps_always: bool) -> Waits:
        made.append(Waits(monkeypatch, naps_always=naps_always))
        return made[-1]

    yield make
    monkeypatch.undo()
    for one in made:
        one.reader.shutdown()
        one.writer.shutdown()


def test_a_reader_naps_until_the_next_message_is_expected(waits: Any) -> None:
    reader = waits(naps_always=False)
    # Of a step there are two: that it is on its way, and what it has sampled.
    reader.message(0.04)
    reader.message(0.003)
    expected = (1 - POLLED_SHARE) * 0.04
    assert reader.at(FIRST_NAP_S / 2) == "poll"
    assert reader.at(0.004) == pytest.approx(0.05 * 0.004)
    assert reader.at(expected - 0.001) == LONGEST_NAP_S
    assert reader.at(expected + 0.001) == "poll"
    # A step that takes longer than the one before is polled for, and moves what is expected.
    assert reader.at(0.3) == "poll"
    reader.message(0.3)
    assert reader.at(0.0029) == "poll"
    reader.message(0.003)
    assert reader.at(0.2) == LONGEST_NAP_S


def test_a_reader_without_a_core_of_its_own_always_naps(waits: Any) -> None:
    reader = waits(naps_always=True)
    reader.message(0.04)
    assert reader.at(FIRST_NAP_S / 2) == "poll"
    assert reader.at(0.039) == LONGEST_NAP_S
    assert reader.at(0.9) == LONGEST_NAP_S

"""SIGTERM waits for the end of what must not be cut off, and is not lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from ray_hetero.runtime.held_signals import sigterm_held


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """What happened, with SIGTERM handled here."""
    events: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: events.append("SIGTERM"))
    yield events
    signal.signal(signal.SIGTERM, before)


def test_it_is_delivered_at_the_end(heard: list[str]) -> None:
    with sigterm_held():
        os.kill(os.getpid(), signal.SIGTERM)
        heard.append("done")
    assert heard == ["done", "SIGTERM"]


def test_after_an_error_too(heard: list[str]) -> None:
    def fail() -> None:
        with sigterm_held():
            os.kill(os.getpid(), signal.SIGTERM)
            raise OSError("no")

    with pytest.raises(OSError, match="no"):
        fail()
    assert heard == ["SIGTERM"]


def test_the_handler_is_the_old_one_again(heard: list[str]) -> None:
    with sigterm_held():
        pass
    assert heard == []
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == ["SIGTERM"]


def test_another_thread_leaves_signals_alone(heard: list[str]) -> None:
    found = []

    def look() -> None:
        with sigterm_held():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]

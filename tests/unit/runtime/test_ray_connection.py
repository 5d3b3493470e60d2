"""Who handles SIGTERM after this process has connected to Ray, and when lines are written."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from ray_hetero.runtime import ray_connection


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def rays(*_: Any) -> None:
    """What Ray installs."""


def vllms(*_: Any) -> None:
    """What vLLM's engine process has installed before."""


@pytest.mark.parametrize(
    ("before", "after"), [(vllms, vllms), (signal.SIG_DFL, rays), (signal.SIG_IGN, rays)]
)
def test_a_handler_that_was_there_stays(before: Any, after: Any) -> None:
    signal.signal(signal.SIGTERM, before)
    with ray_connection._own_handler_kept():
        signal.signal(signal.SIGTERM, rays)
    assert signal.getsignal(signal.SIGTERM) is after


def test_lines_are_in_a_file_as_soon_as_they_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file))
    print("cpu rank 0: 46 steps")
    assert file.getvalue() == b""
    ray_connection.show_lines_at_once()
    print("cpu rank 0: 414 steps")
    assert file.getvalue() == b"cpu rank 0: 46 steps\ncpu rank 0: 414 steps\n"


def test_an_output_that_is_no_file_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    # As a notebook's.
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    ray_connection.show_lines_at_once()

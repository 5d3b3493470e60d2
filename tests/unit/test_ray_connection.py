"""Who handles SIGTERM after this process has connected to Ray."""

from __future__ import annotations

import signal
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

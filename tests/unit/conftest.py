"""Unit tests start no Ray and no engine."""

from __future__ import annotations

from typing import NoReturn

import pytest
import ray


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("a unit test started Ray; it belongs in tests/cluster")

    monkeypatch.setattr(ray, "init", refuse)

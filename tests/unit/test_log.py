"""Lines of both packages appear under vLLM's settings."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from ray_hetero.log import logger, show_placement


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """What reaches vLLM's handlers, at vLLM's usual level."""
    seen: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record)

    parent, handler = logging.getLogger("vllm"), Handler()
    monkeypatch.setattr(parent, "level", logging.INFO)
    monkeypatch.setattr(parent, "disabled", False)
    parent.manager._clear_cache()  # type: ignore[attr-defined]
    parent.addHandler(handler)
    yield seen
    parent.removeHandler(handler)


def test_lines_of_placement_appear_where_ours_do(records: list[logging.LogRecord]) -> None:
    show_placement()
    show_placement()
    theirs = logging.getLogger("placement.cluster.ray_cluster")
    theirs.info("a node was left out")
    theirs.debug("too much")
    logger.info("one of ours")
    assert [record.getMessage() for record in records] == ["a node was left out", "one of ours"]

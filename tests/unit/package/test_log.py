"""Lines of both packages appear under vLLM's settings."""

from __future__ import annotations

import logging

import pytest

from ray_hetero.log import adopt, logger


def test_lines_of_placement_appear_where_ours_do(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record)

    placement, vllm = logging.getLogger("placement"), logging.getLogger("vllm")
    monkeypatch.setattr(placement, "parent", placement.parent)
    monkeypatch.setattr(vllm, "handlers", [Handler()])
    before = vllm.level
    vllm.setLevel(logging.INFO)
    adopt("placement")
    theirs = logging.getLogger("placement.cluster.ray_cluster")
    theirs.info("a node was left out")
    theirs.debug("too much")
    logger.info("one of ours")
    vllm.setLevel(before)
    assert [record.getMessage() for record in seen] == ["a node was left out", "one of ours"]

"""Progress of experts on their way into memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from placement.units import GIB
from ray_hetero.kernels.experts import load_progress
from ray_hetero.kernels.experts.load_progress import LoadProgress


def test_it_is_said_every_ten_seconds_until_the_last_layer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(load_progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    caplog.set_level("INFO", "vllm.ray_hetero")
    progress = LoadProgress(8)
    for _ in range(8):
        now[0] += 4
        progress.add(2 * GIB)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "experts of 3 of 8 layers are in memory, 6.0 GiB at 0.50 GiB/s, 20 s left",
        "experts of 6 of 8 layers are in memory, 12.0 GiB at 0.50 GiB/s, 8 s left",
    ]

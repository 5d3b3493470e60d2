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


def test_bytes_of_files_are_counted_while_they_are_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(load_progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    caplog.set_level("INFO", "vllm.ray_hetero")
    progress = LoadProgress(2, 16 * GIB)
    for _ in range(4):
        now[0] += 6
        progress.read(2 * GIB)
    progress.add(8 * GIB)
    now[0] += 16
    progress.read(8 * GIB)
    progress.add(8 * GIB)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "experts of 0 of 2 layers are in memory, 4.0 of 16.0 GiB at 0.33 GiB/s, 36 s left",
        "experts of 0 of 2 layers are in memory, 8.0 of 16.0 GiB at 0.33 GiB/s, 24 s left",
        "experts of 1 of 2 layers are in memory, 16.0 of 16.0 GiB at 0.40 GiB/s, 0 s left",
    ]

"""Files of the experts that tokens have chosen."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from ray_hetero.errors import ConfigError
from ray_hetero.observability.route_trace import RouteTrace, RouteWriter, TracedLayer

LAYERS = (TracedLayer("a", 40, 2), TracedLayer("b", 300, 3))


def records(*given: tuple[int, list[list[int]]]) -> bytes:
    numbers = [n for layer, rows in given for n in (layer, len(rows), *np.ravel(rows).tolist())]
    return np.array(numbers, dtype="<u2").tobytes()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "routes"
    writer = RouteWriter(path, LAYERS, 10_000)
    writer.add(records((0, [[1, 39]]), (1, [[299, 0, 7], [5, 65535, 65535]])), 0)
    writer.add(b"", 0)
    writer.add(records((0, [])), 0)
    # A killed process leaves a part of a record.
    path.write_bytes(path.read_bytes() + records((1, [[1, 2, 3]]))[:-1])
    trace = RouteTrace.read(path)
    assert trace.layers == LAYERS
    assert [(layer, rows.tolist()) for layer, rows in trace.records] == [
        (0, [[1, 39]]), (1, [[299, 0, 7], [5, -1, -1]]), (0, []),
    ]  # fmt: skip


def test_a_file_ends_with_its_last_whole_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "routes"
    caplog.set_level("INFO", "vllm.ray_hetero")
    record = records((0, [[1, 2]]))
    RouteWriter(path, LAYERS, 10_000)
    writer = RouteWriter(path, LAYERS, path.stat().st_size + 2 * len(record) + 1)
    for _ in range(2):
        writer.add(record, 0)
        assert not writer.is_full
    for lost in (0, 3):
        writer.add(record, lost)
        assert writer.is_full
    assert len(RouteTrace.read(path).records) == 2
    assert "is complete (experts.trace_mib)" in caplog.text
    assert "3 records are missing" in caplog.text


def test_a_disk_without_room_ends_the_file_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = RouteWriter(Path("/dev/full"), LAYERS, 10_000)
    assert writer.is_full
    assert f"/dev/full is not continued: [Errno 28] {os.strerror(28)}" in caplog.text


def test_other_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"experts\.trace: .* cannot be written: Is a directory"):
        RouteWriter(tmp_path, LAYERS, 10_000)
    path = tmp_path / "other"
    for content in (b"", b"[]\n", b'{"format": "x"}\n', b"\xff\n"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="expected a file of 'ray_hetero routes 1'"):
            RouteTrace.read(path)
    RouteWriter(path, LAYERS, 10_000).add(records((2, [])), 0)
    with pytest.raises(ValueError, match="a record of layer 2, expected one of 2"):
        RouteTrace.read(path)

"""How far a start has come: a bar where something can draw one, and a line in the log anyway."""

from __future__ import annotations

import re

import pytest

from ray_hetero.observability.progress import StartupProgress
from ray_hetero.observability.startup_times import StartupTimes
from ray_hetero.observability.world_table import as_text


def warm_up(progress: StartupProgress) -> None:
    with progress.step("warm up", total=3) as step:
        for _ in range(3):
            step.advance()
        step.outcome = "done"


@pytest.fixture(autouse=True)
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the log says."""
    said: list[str] = []
    monkeypatch.setattr(
        "ray_hetero.log.logger.info", lambda text, *values: said.append(text % values)
    )
    return said


def test_a_notebook_shows_a_bar_as_text(
    capsys: pytest.CaptureFixture[str], lines: list[str]
) -> None:
    warm_up(StartupProgress(in_notebook=True))
    drawn = capsys.readouterr().err
    assert "\r[6/6] warm up: 100%|" in drawn
    assert "\x1b" not in drawn, "a notebook draws no terminal's control codes"
    assert [re.sub(r"\d+\.\d s", "… s", line) for line in lines] == ["[6/6] warm up: … s: done"]


def test_a_file_gets_the_line_only(capsys: pytest.CaptureFixture[str], lines: list[str]) -> None:
    warm_up(StartupProgress())
    assert capsys.readouterr().err == ""
    assert [re.sub(r"\d+\.\d s", "… s", line) for line in lines] == ["[6/6] warm up: … s: done"]


def test_the_table_has_every_step_once_and_the_slowest_rank_of_each_part() -> None:
    times = StartupTimes(earlier_s=7.0)
    times.add("plan", 1.0)
    times.add("connect", 4.0)
    # Another engine was faster.
    times.add("plan", 2.0)
    for rank, seconds in enumerate((3.0, 3.9, 0.5)):
        times.add_of_rank("connect", "loading weights", rank, seconds)
        times.add_of_rank("connect", "nothing", rank, 0.01)
    lines = [re.split(r"\s*│\s*", line)[1:-1] for line in as_text(times.table()).splitlines()]
    assert [line for line in lines if line] == [
        ["process and model configuration (vLLM)", "7.0", ""],
        ["plan", "3.0", ""],
        ["connect", "4.0", ""],
        ["loading weights", "3.9", "1"],
        ["between the steps (vLLM)", "0.0", ""],
    ]


def test_a_rank_is_timed_from_part_to_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("ray_hetero.observability.startup_times.time.monotonic", lambda: now)
    times = StartupTimes()
    for begin in (100.0, 200.0):
        now = begin
        times.ranks_begin()
        for rank, seconds in ((0, 2.0), (1, 3.0), (0, 7.0)):
            now = begin + seconds
            times.rank_is_done("warm up", "dummy forward pass", rank)
        times.add("warm up", 7.0)
    rows = as_text(times.table())
    assert re.search(r"dummy forward pass\s*│\s*14\.0\s*│\s*0 ", rows), rows

"""How far a start has come: a bar where something can draw one, and a line in the log anyway."""

from __future__ import annotations

import re

import pytest

from ray_hetero.observability.progress import StartupProgress


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

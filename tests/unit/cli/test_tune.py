"""`ray-hetero tune`: which settings are tried in which order, and which one is the best."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from typer.testing import CliRunner

from ray_hetero.cli import tune
from ray_hetero.cli.main import commands
from ray_hetero.cli.serving.load import Measured
from ray_hetero.errors import ConfigError, StartupError

CANDIDATES: list[dict[str, Any]] = [
    {"layout": [["cpu", "cpu"]], "expert_ranks": 0, "decode_step_s": 0.01},
    {"layout": [["gpu"]], "expert_ranks": 0, "problem": "does not fit"},
    {"layout": [["gpu"], ["cpu"]], "expert_ranks": 0, "decode_step_s": 0.02},
    {"layout": [["gpu"]], "expert_ranks": 2, "decode_step_s": 0.03},
]


def test_runner_ups_that_fit_are_tried_after_the_plan() -> None:
    found = tune.layout_settings({"candidates": CANDIDATES}, 3)
    assert [one.options for one in found] == [
        (), ("--layout", "[[gpu], [cpu]]"), ("--layout", "[[gpu]]", "--experts", "2"),
    ]  # fmt: skip
    assert [one.name for one in tune.layout_settings({"candidates": CANDIDATES}, 1)] == [
        "as planned"
    ]
    # Of a layout that the user gives, there are no others.
    assert [one.options for one in tune.layout_settings({}, 3)] == [()]


def run(
    monkeypatch: pytest.MonkeyPatch, speeds: dict[str, float], *options: str
) -> tuple[list[str], Any]:
    """Options of the trials in their order, and the answer of the command.

    Args:
        monkeypatch: of the test.
        speeds: tokens per second by options of `ray-hetero plan`; others do not start.
        options: of the command.

    """
    tried = []

    def planned(model: str, given: Sequence[str]) -> dict[str, Any]:
        if "--compare" not in given:
            tried.append(" ".join(given))
        command = f"vllm serve {model} {json.dumps(' '.join(given))}"
        return {"candidates": CANDIDATES, "command": command, "batch": 2, "weight_bytes": 1}

    def measured(command: Sequence[str], *_: object) -> Measured:
        if command[3] not in speeds:
            raise StartupError("no room\nand a long log")
        return Measured(2, 0.1, 0.5, 0.6, speeds[command[3]])

    monkeypatch.setattr(tune, "planned", planned)
    monkeypatch.setattr(tune, "_measured", measured)
    return tried, CliRunner().invoke(commands, ["tune", "m", *options])


def test_each_setting_is_tried_with_the_best_of_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = "--users 2 --layout [[gpu], [cpu]]"
    speeds = {
        "--users 2": 10.0, layout: 20.0, f"{layout} --max-model-len 8k": 19.0,
        f"{layout} --speculative 3,0.7": 30.0,
    }  # fmt: skip
    typed = ("--users", "2", "--lengths", "8k", "--drafts", "3", "--port", "1")
    tried, answer = run(monkeypatch, speeds, *typed)
    assert tried == list(speeds)
    assert "Best: [[gpu], [cpu]], 3 drafts" in answer.output
    assert answer.output.endswith(f"Run: vllm serve m '{list(speeds)[-1]}' --port 1\n")


def test_a_setting_that_does_not_start_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    _, answer = run(monkeypatch, {"": 10.0})
    assert "not measured: no room\n" in answer.output
    assert "Best: as planned" in answer.output
    _, answer = run(monkeypatch, {})
    assert isinstance(answer.exception, StartupError)
    assert "none of these settings served" in str(answer.exception)


@pytest.mark.parametrize("drafts", ["x", "0", "1,99"])
def test_numbers_of_drafts_are_checked(drafts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, answer = run(monkeypatch, {}, "--drafts", drafts)
    assert isinstance(answer.exception, ConfigError)
    assert str(answer.exception).startswith("--drafts: expected numbers from 1 to 16")

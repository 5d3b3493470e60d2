"""Busy time of steps, and predicted beside measured for the step that the plan has priced."""

from __future__ import annotations

import pytest

from ray_hetero.step_clock import PredictedStep, StepClock

PREDICTED = PredictedStep(ms=10.0, tokens=1, context=4096)


def lines_of(calls: list[tuple[float, int]], predicted: PredictedStep | None) -> list[str]:
    """What is reported after these calls of seconds and tokens."""
    lines: list[str] = []
    clock = StepClock(lines.append, interval_s=1e9, predicted=predicted)
    for seconds, tokens in calls[:-1]:
        clock.add(seconds, tokens, None)
    clock._interval_s = -1
    clock.add(*calls[-1], None)
    return lines


def test_only_steps_of_the_priced_size_are_compared() -> None:
    # A prompt of 50 tokens, its sampling, then two decode steps with theirs.
    calls = [(0.5, 50), (0.1, 0), (0.011, 1), (0.001, 0), (0.015, 1), (0.003, 0)]
    (line,) = lines_of(calls, PREDICTED)
    assert line.startswith("3 steps of 17.3 tokens: 210.00 ms busy")
    assert line.endswith(
        "steps of 1 tokens: 15.00 ms busy, 10.00 ms predicted (at context 4096), "
        "measured / predicted = 1.50"
    )


@pytest.mark.parametrize(
    ("calls", "predicted"), [([(0.5, 50), (0.1, 0)], PREDICTED), ([(0.01, 1), (0.001, 0)], None)]
)
def test_nothing_is_compared_without_such_steps_or_without_a_plan(
    calls: list[tuple[float, int]], predicted: PredictedStep | None
) -> None:
    (line,) = lines_of(calls, predicted)
    assert "predicted" not in line
    assert " ms busy" in line


def test_totals_start_again_after_a_report() -> None:
    lines: list[str] = []
    clock = StepClock(lines.append, interval_s=-1, predicted=PREDICTED)
    clock.add(0.02, 1, None)
    clock.add(0.04, 1, None)
    assert [line.rpartition("= ")[2] for line in lines] == ["2.00", "4.00"]

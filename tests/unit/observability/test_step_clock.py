"""Busy time of steps, and predicted beside measured for the step that the plan has priced."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from ray_hetero.kernels.layers.layer_tokens import LayerTokens
from ray_hetero.observability.step_clock import Exchanged, PredictedStep, StepClock

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


def test_what_steps_that_verify_drafts_take_is_told_beside_the_others() -> None:
    lines: list[str] = []
    clock = StepClock(lines.append, interval_s=1e9)
    # Each with its sampling, and with what a drafter takes.
    for seconds, tokens, is_verifying in (
        (0.5, 50, False), (0.1, 0, False), (0.02, 4, True), (0.002, 0, False), (0.02, 8, True),
    ):  # fmt: skip
        clock.add(seconds, tokens, None, is_verifying=is_verifying)
    clock._interval_s = -1
    clock.add(0.002, 0, None)
    (line,) = lines
    assert "; 2 of them verified drafts: 6.0 tokens, 22.00 ms busy, 600.00 ms the others;" in line
    assert clock.totals.verifying_tokens == 12


def test_totals_start_again_after_a_report() -> None:
    lines: list[str] = []
    clock = StepClock(lines.append, interval_s=-1, predicted=PREDICTED)
    clock.add(0.02, 1, None)
    clock.add(0.04, 1, None)
    assert [line.rpartition("= ")[2] for line in lines] == ["2.00", "4.00"]


@dataclass
class Boundary:
    """A stage boundary that has exchanged what a test says."""

    exchanged: Exchanged = field(default_factory=Exchanged)
    computed_at: float = 0.0

    def take(self) -> Exchanged:
        return self.exchanged


def test_waiting_and_exchange_are_no_computing() -> None:
    lines: list[str] = []
    clock = StepClock(lines.append, interval_s=-1)
    boundary: Any = Boundary(Exchanged(0.03, 0.01, received_bytes=2048, sent_bytes=1024))
    clock.add(0.1, 4, boundary)
    assert clock.totals.busy_s == pytest.approx(0.06)
    assert (clock.totals.waiting_s, clock.totals.exchange_s) == (0.03, 0.01)
    assert "30.00 ms waiting for the previous stage, 10.00 ms exchange" in lines[0]
    assert "2.0 KiB received, 1.0 KiB sent a step; busy " in lines[0]


def test_a_line_says_what_the_cores_waited_for_columns() -> None:
    lines: list[str] = []
    clock = StepClock(lines.append, interval_s=-1)
    clock.totals.count(LayerTokens(columns_waited_s=0.006))
    clock.add(0.06, 4, None)
    assert "60.00 ms busy (6.00 ms of it waiting for the GPU's columns), 0.00 ms" in lines[0]
    clock.add(0.02, 4, None)
    assert "20.00 ms busy, 0.00 ms waiting" in lines[1]


def test_what_a_gpu_computes_after_the_call_counts_once() -> None:
    clock = StepClock(lambda line: None, interval_s=1e9, predicted=PREDICTED)
    boundary: Any = Boundary()
    clock.add(0.0, 1, boundary)
    ended = clock._ended
    boundary.computed_at = ended + 0.002
    while time.perf_counter() < ended + 0.01:
        pass
    clock.add(0.0, 1, boundary)
    assert clock.totals.busy_s == pytest.approx(0.002)
    assert clock.totals.priced_s == pytest.approx(0.002)
    clock.add(0.0, 0, boundary)
    assert clock.totals.busy_s == pytest.approx(0.002)


def test_computing_up_to_the_next_call_counts_where_it_has_not_ended() -> None:
    clock = StepClock(lambda line: None, interval_s=1e9)
    boundary: Any = Boundary(computed_at=time.perf_counter() + 1000)
    clock.add(0.0, 1, boundary)
    assert 0 <= clock.totals.busy_s < 500

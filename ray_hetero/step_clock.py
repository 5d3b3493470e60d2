"""Where a rank's time goes in each step: computing, or waiting for the stage before it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ray_hetero.exchange import StageBoundary

REPORT_SECONDS = 30.0


@dataclass
class StepTotals:
    """Sums since the last report; seconds and bytes."""

    steps: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    """Inside the worker's calls, less waiting."""
    waiting_s: float = 0.0
    """For tensors of the previous stage."""
    received_bytes: int = 0

    def __str__(self) -> str:
        if not self.steps:
            return "no steps"
        busy, waiting = (1000 * s / self.steps for s in (self.busy_s, self.waiting_s))
        return (
            f"{self.steps} steps of {self.tokens / self.steps:.1f} tokens: "
            f"{busy:.2f} ms busy, {waiting:.2f} ms waiting for the previous stage, "
            f"{self.received_bytes / self.steps / 1024:.1f} KiB received a step"
        )


class StepClock:
    """Adds up a rank's steps and reports them every so often.

    Args:
        report: takes one line.
        interval_s: seconds between reports while there are steps.

    """

    def __init__(self, report: Callable[[str], None], interval_s: float = REPORT_SECONDS) -> None:
        self._report = report
        self._interval_s = interval_s
        self._last = time.monotonic()
        self.totals = StepTotals()

    def add(self, seconds: float, tokens: int, boundary: StageBoundary | None) -> None:
        """Count one call of the worker; a step is counted by its tokens."""
        waited, received = boundary.take_waiting() if boundary is not None else (0.0, 0)
        totals = self.totals
        totals.steps += tokens > 0
        totals.tokens += tokens
        totals.busy_s += seconds - waited
        totals.waiting_s += waited
        totals.received_bytes += received
        if time.monotonic() - self._last > self._interval_s and totals.steps:
            self._report(str(totals))
            self.totals = StepTotals()
            self._last = time.monotonic()

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
    priced_steps: int = 0
    """Steps of as many tokens as the one that the plan has priced."""
    priced_s: float = 0.0
    """Of `busy_s`, what these took."""

    def __str__(self) -> str:
        if not self.steps:
            return "no steps"
        busy, waiting = (1000 * s / self.steps for s in (self.busy_s, self.waiting_s))
        return (
            f"{self.steps} steps of {self.tokens / self.steps:.1f} tokens: "
            f"{busy:.2f} ms busy, {waiting:.2f} ms waiting for the previous stage, "
            f"{self.received_bytes / self.steps / 1024:.1f} KiB received a step"
        )


@dataclass(frozen=True)
class PredictedStep:
    """The decode step that the plan has priced, on one rank's stage."""

    ms: float
    tokens: int
    """One for each sequence."""
    context: int
    """Tokens of each of them so far."""

    def against(self, totals: StepTotals) -> str:
        """Predicted beside measured; nothing where no such step was run."""
        if not totals.priced_steps:
            return ""
        measured = 1000 * totals.priced_s / totals.priced_steps
        return (
            f"; steps of {self.tokens} tokens: {measured:.2f} ms busy, {self.ms:.2f} ms predicted "
            f"(at context {self.context}), measured / predicted = {measured / self.ms:.2f}"
        )


class StepClock:
    """Adds up a rank's steps and reports them every so often.

    Args:
        report: takes one line.
        interval_s: seconds between reports while there are steps.
        predicted: what the plan expects of this rank; None where it expects nothing.

    """

    def __init__(
        self,
        report: Callable[[str], None],
        interval_s: float = REPORT_SECONDS,
        predicted: PredictedStep | None = None,
    ) -> None:
        self._report = report
        self._interval_s = interval_s
        self._predicted = predicted
        self._is_priced = False
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
        if tokens:
            self._is_priced = self._predicted is not None and tokens == self._predicted.tokens
        # A call without tokens (sampling) belongs to the step before it.
        if self._is_priced:
            totals.priced_steps += tokens > 0
            totals.priced_s += seconds - waited
        if time.monotonic() - self._last > self._interval_s and totals.steps:
            compared = self._predicted.against(totals) if self._predicted is not None else ""
            self._report(f"{totals}{compared}")
            self.totals = StepTotals()
            self._last = time.monotonic()

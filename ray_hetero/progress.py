"""Show the start-up: each step in the log with its time, and a bar on a terminal or notebook."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from vllm.logger import init_logger

logger: logging.Logger = init_logger("vllm.ray_hetero")
"""Below vLLM's own logger, so that its settings and format hold."""

STEPS = ("discover", "plan", "reserve", "spawn", "connect", "warm up")


class StartupProgress:
    """The six steps of start-up, logged and drawn."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            console=Console(file=sys.stderr),
            transient=True,
            disable=not sys.stderr.isatty(),
        )

    @contextmanager
    def step(self, name: str, total: int = 1) -> Iterator[StepProgress]:
        """Time one of the six steps; draws a bar of `total` parts while it runs."""
        number = STEPS.index(name) + 1
        label = f"[{number}/{len(STEPS)}] {name}"
        start = time.monotonic()
        with self._progress:
            task = self._progress.add_task(label, total=total)
            step = StepProgress(self._progress, task)
            yield step
            self._progress.remove_task(task)
        outcome = f": {step.outcome}" if step.outcome else ""
        logger.info("%s: %.1f s%s", label, time.monotonic() - start, outcome)


class StepProgress:
    """One running step."""

    def __init__(self, progress: Progress, task: object) -> None:
        self._progress = progress
        self._task = task
        self.outcome = ""
        """What came of it, for the log."""

    def advance(self) -> None:
        """One more part of the step is done."""
        self._progress.advance(self._task)  # type: ignore[arg-type]

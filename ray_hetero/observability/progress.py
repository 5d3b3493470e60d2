"""Show the start-up: each step in the log with its time, and a bar on a terminal or notebook."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from tqdm import tqdm

from ray_hetero.log import logger
from ray_hetero.observability.startup_times import StartupTimes

STEPS = ("discover", "plan", "reserve", "spawn", "connect", "warm up")


class StartupProgress:
    """The six steps of start-up, logged and drawn.

    Args:
        in_notebook: whether a notebook shows what this process writes.
        earlier_s: how long this process ran for the engine before the first step, if it did.

    """

    def __init__(self, *, in_notebook: bool = False, earlier_s: float | None = None) -> None:
        self.times = StartupTimes(earlier_s)
        self._bar = _no_bar
        if sys.stderr.isatty():
            self._bar = _terminal_bar
        elif in_notebook:
            self._bar = _notebook_bar

    @contextmanager
    def step(self, name: str, total: int = 1) -> Iterator[StepProgress]:
        """Time one of the six steps; draws a bar of `total` parts while it runs."""
        number = STEPS.index(name) + 1
        label = f"[{number}/{len(STEPS)}] {name}"
        start = time.monotonic()
        with self._bar(label, total) as advance:
            step = StepProgress(advance)
            yield step
        outcome = f": {step.outcome}" if step.outcome else ""
        seconds = time.monotonic() - start
        self.times.add(name, seconds)
        logger.info("%s: %.1f s%s", label, seconds, outcome)


class StepProgress:
    """One running step."""

    def __init__(self, advance: Callable[[], object]) -> None:
        self._advance = advance
        self.outcome = ""
        """Outcome of the step, for the log."""

    def advance(self) -> None:
        """One more part of the step is done."""
        self._advance()


@contextmanager
def _no_bar(label: str, total: int) -> Iterator[Callable[[], object]]:
    yield lambda: None


@contextmanager
def _terminal_bar(label: str, total: int) -> Iterator[Callable[[], object]]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda: progress.advance(task)


@contextmanager
def _notebook_bar(label: str, total: int) -> Iterator[Callable[[], object]]:
    # The notebook's kernel passes its children's output on as text, in which a carriage return
    # is all that can be used for drawing.
    with tqdm(total=total, desc=label, file=sys.stderr, leave=total > 1) as bar:
        yield bar.update

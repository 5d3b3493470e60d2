"""Table of the seconds of an engine's start-up."""

from __future__ import annotations

import time
from collections import defaultdict

from rich.table import Table

LEAST_SECONDS = 0.05
"""Parts of a step that take less are left out."""


class StartupTimes:
    """Adds up the seconds of the six steps, and of what the ranks do in them.

    A step that is made again, as `plan` where another engine was faster, counts as one.

    Args:
        earlier_s: how long this process ran before; None where that was not for the engine, as in
            a notebook.

    """

    def __init__(self, earlier_s: float | None = None) -> None:
        self._earlier_s = earlier_s
        self._began = time.monotonic()
        self._steps: dict[str, float] = {}
        self._of_ranks: defaultdict[str, defaultdict[str, defaultdict[int, float]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(float))
        )
        self._list_began = self._began
        self._last: dict[int, float] = {}

    def add(self, step: str, seconds: float) -> None:
        """Count one of the six steps."""
        self._steps[step] = self._steps.get(step, 0.0) + seconds

    def add_of_rank(self, step: str, part: str, rank: int, seconds: float) -> None:
        """Count what a rank has done inside of a step."""
        self._of_ranks[step][part][rank] += seconds

    def ranks_begin(self) -> None:
        """All ranks begin a list of parts, one after the other on each."""
        self._last.clear()
        self._list_began = time.monotonic()

    def rank_is_done(self, step: str, part: str, rank: int) -> None:
        """A rank is done with the next part of its list."""
        now = time.monotonic()
        self.add_of_rank(step, part, rank, now - self._last.get(rank, self._list_began))
        self._last[rank] = now

    def table(self) -> Table:
        """One row a step, and below it one for each part, with the rank that took longest.

        Ranks do their parts at the same time, and one waits for another in some of them: parts
        need not add up to their step.
        """
        total = time.monotonic() - self._began
        table = Table(title=f"Start-up: {total + (self._earlier_s or 0):.1f} s")
        table.title_justify = "left"
        table.add_column("step")
        table.add_column("s", justify="right")
        table.add_column("slowest rank", justify="right")
        if self._earlier_s is not None:
            table.add_row("process and model configuration (vLLM)", f"{self._earlier_s:.1f}", "")
        for step, seconds in self._steps.items():
            table.add_row(step, f"{seconds:.1f}", "")
            for part, by_rank in self._of_ranks[step].items():
                rank = max(by_rank, key=by_rank.__getitem__)
                if by_rank[rank] >= LEAST_SECONDS:
                    table.add_row(f"  {part}", f"{by_rank[rank]:.1f}", str(rank))
        between = total - sum(self._steps.values())
        table.add_row("between the steps (vLLM)", f"{max(between, 0.0):.1f}", "")
        return table

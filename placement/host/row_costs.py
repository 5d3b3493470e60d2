"""Time of a step of several rows on a socket in steps of a single row, kept once measured.

A product reads its weights once, however many rows it has; what more rows cost beside that depends
on processor, kernel and format of the weights.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from placement.host.bandwidth_cache import is_fresh, kept_or_measured
from placement.host.cpulist import format_cpulist
from placement.host.other_work import is_beside_others

ROWS = (1, 2, 4, 8, 16, 32)
"""Numbers of rows that are measured."""


@dataclass(frozen=True)
class RowCosts:
    """Cost of products of several rows beside those of one row."""

    ratios: tuple[float, ...]
    """Cost of each number of rows in `ROWS`, ascending, relative to one row; the first is 1."""
    is_measured: bool = True
    """Whether this project has measured them; else a description says so."""

    @classmethod
    def of_times(cls, seconds: Sequence[float]) -> RowCosts:
        """Ratios of measured times, of which more rows never take less."""
        longest = tuple(accumulate(seconds, max))
        return cls(tuple(one / longest[0] for one in longest))

    def of(self, rows: float) -> float:
        """Cost of so many rows: on a line between the two nearest that are known, or through the
        last two."""
        above = min(max(1, bisect_left(ROWS, rows)), len(ROWS) - 1)
        (left, right), (low, high) = ROWS[above - 1 : above + 1], self.ratios[above - 1 : above + 1]
        return low + (rows - left) / (right - left) * (high - low)

    def __str__(self) -> str:
        """Sentence about the costs, for people."""
        rows, costs = _listed(map(str, ROWS)), _listed(f"{one:.2f}" for one in self.ratios)
        return f"{rows} rows cost {costs} times one row"


def _listed(words: Any) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}"


def cached_row_costs(
    cpus: Sequence[int],
    cpu_model: str | None,
    kernel: str,
    *,
    probe: Callable[[Sequence[int]], RowCosts],
    directory: Path | None = None,
    is_busy: Callable[[], bool] = is_beside_others,
) -> RowCosts:
    """Costs on these CPUs; measured where no fresh figure is kept.

    Args:
        cpus: logical CPUs, one per core.
        cpu_model: the processor's name; another one makes the figure void, as another kernel does.
        kernel: what computes the products: instruction set, format of the weights, version.
        probe: measures.
        directory: where the files are; None is `cache_directory()`.
        is_busy: whether other programs compute on this host.

    Raises:
        NativeError: it cannot be measured here.

    """
    return kept_or_measured(
        f"rows, {kernel}, {cpu_model or 'unknown CPU'}, CPUs {format_cpulist(cpus)}",
        figure_of=_kept,
        measure=lambda: probe(cpus),
        stored=lambda costs: {"ratios": list(costs.ratios)},
        directory=directory,
        is_busy=is_busy,
    )


def _kept(entry: Any) -> RowCosts | None:
    """The kept figure; None where there is none, it is no figure, or it is too old."""
    if not isinstance(entry, dict) or not is_fresh(entry.get("measured_at")):
        return None
    ratios = entry.get("ratios")
    if not isinstance(ratios, list) or not all(isinstance(one, int | float) for one in ratios):
        return None
    return RowCosts(tuple(map(float, ratios))) if are_ratios(ratios) else None


def are_ratios(ratios: Sequence[float]) -> bool:
    """Whether these may be ratios: as many as `ROWS`, ascending from 1 on."""
    return len(ratios) == len(ROWS) and ratios[0] == 1 and list(ratios) == sorted(ratios)

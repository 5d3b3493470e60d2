"""The kernel's list format for CPUs and NUMA nodes: `0-3,8,10-11`."""

from __future__ import annotations

from collections.abc import Iterable

from placement.given import shown

MAX_ID = 1 << 16
"""Limit above every CPU and node number of Linux (NR_CPUS ≤ 8192); guards against absurd ranges."""
MOST_DIGITS = 20
"""More than any number below that has, however many zeros precede it."""


def parse_cpulist(text: str) -> tuple[int, ...]:
    """Ascending numbers of a list such as `0-3,8`; empty text is no number.

    Raises ValueError with what is wrong with it.
    """
    numbers: set[int] = set()
    for part in filter(None, (part.strip() for part in text.strip().split(","))):
        first, dash, last = part.partition("-")
        if not (_is_number(first) and (not dash or _is_number(last))):
            raise ValueError(f"{shown(part)} is neither a number nor a range such as 0-3")
        low, high = int(first), int(last) if dash else int(first)
        if not low <= high < MAX_ID:
            raise ValueError(f"{shown(part)} is not a range of ascending numbers below {MAX_ID}")
        numbers.update(range(low, high + 1))
    return tuple(sorted(numbers))


def format_cpulist(numbers: Iterable[int]) -> str:
    """The shortest list for these numbers: (0, 1, 2, 8) → `0-2,8`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS

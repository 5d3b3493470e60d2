"""Time of a step by its parts, in picoseconds.

Times are whole picoseconds: sums over layers are then exact, and equal splits really tie.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

PICO = 10**12


@dataclass(frozen=True)
class Step:
    """Time of one step on one stage by its parts, in picoseconds."""

    weights: int = 0
    kv: int = 0
    compute: int = 0
    """Time of operations beyond the time of the reads, on a socket for all tokens but one."""
    output: int = 0
    """Output matrix on the last stage."""
    sampling: int = 0
    """Drawing a token of each sequence, where the last stage is on sockets."""
    reduce: int = 0
    """All-reduces inside the tensor-parallel group."""
    fixed: int = 0
    """Launches and barriers."""
    draft: int = 0
    """A drafter's own steps, on the last stage."""
    send: int = 0
    """Activations to the next stage."""
    experts: int = 0
    """Experts that expert ranks compute, while the stage waits."""
    handover: int = 0
    """Tokens to expert ranks, and their sums back."""

    @property
    def total(self) -> int:
        """All parts."""
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def seconds(self) -> float:
        """All parts, in seconds."""
        return self.total / PICO

    def parts(self) -> dict[str, float]:
        """Seconds by part, in the order they are declared."""
        return {part.name: getattr(self, part.name) / PICO for part in fields(self)}

    def __add__(self, other: Step) -> Step:
        return Step(*(getattr(self, p.name) + getattr(other, p.name) for p in fields(self)))

    def __mul__(self, times: int) -> Step:
        return Step(*(getattr(self, p.name) * times for p in fields(self)))


def total_step(steps: Iterable[Step]) -> Step:
    """Sum of steps, part by part."""
    return sum(steps, Step())


def pico(seconds: float) -> int:
    """Whole picoseconds, rounded up."""
    return math.ceil(seconds * PICO)

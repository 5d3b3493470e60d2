"""A layer's experts, some of which a GPU reads over its link and computes, while the sockets that
hold all of them compute the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SPLIT_GAIN = 0.03
"""Least part of a layer's time that a split must be predicted to save, beside the better of the two
alone."""
SPLIT_SECONDS = 0.3e-3
"""Least seconds that a split must save beside `SPLIT_GAIN`: its kernels are launched, and the last
piece of weights is computed with after it has come.  Assumed, not measured."""
SPLIT_STEPS = 32
"""Steps between none of a layer's experts and all, as far as there are so many: a finer share saves
less than a thirtieth of the layer's time, and each one has pieces of its own."""


@dataclass(frozen=True)
class ExpertTimes:
    """Seconds of a layer's experts for the tokens of one step."""

    cores: float
    """Seconds of the sockets for all experts; some experts take their share of it."""
    handover: float
    """Seconds of tokens to the sockets and of sums back, however many experts they compute."""
    link: float
    """Seconds of the GPU for all experts; some experts take their share of it."""

    def seconds(self, share: float) -> float:
        """Seconds of a layer of whose experts the GPU computes such a share, from 0 to 1."""
        sockets = 0.0 if share == 1 else (1 - share) * self.cores + self.handover
        return max(sockets, share * self.link)


def splits(count: int) -> tuple[int, ...]:
    """How many of so many experts a GPU may compute: none, some, all."""
    return (*range(0, count, max(1, count // SPLIT_STEPS)), count)


def best_split(times: ExpertTimes, allowed: Sequence[int], count: int) -> int:
    """How many of a layer's experts the GPU computes so that both end as early as they can.

    None or all where a split does not save `SPLIT_GAIN` and `SPLIT_SECONDS`; of several that take
    as long, the most.

    Args:
        times: of the layer.
        allowed: numbers of experts to choose from.
        count: experts of the layer.

    """

    def cost(experts: int) -> float:
        seconds = times.seconds(experts / count)
        is_split = 0 < experts < count
        return seconds / (1 - SPLIT_GAIN) + SPLIT_SECONDS if is_split else seconds

    return min(sorted(allowed, reverse=True), key=cost)

"""Cut a row of layers into consecutive stages: the best cut there is, by dynamic programming.

Costs are whole numbers, so equal cuts tie exactly; of these the earlier stages get fewer layers.
Layers that no stage may begin with are `barred`.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class StageCosts:
    """Costs of layers at one place in the pipeline."""

    layers: tuple[int, ...]
    """Cost of each layer of the model there."""
    fixed: int
    """Cost beside its layers."""
    reach: tuple[int, ...]
    """End (exclusive) of the longest run of layers that fits, by the run's first layer."""


def reach_of(needs: Sequence[int], room: int) -> tuple[int, ...]:
    """End of the longest run whose needs together stay within `room`, by its first layer."""
    sums = [0, *accumulate(needs)]
    reach, end = [], 0
    for start in range(len(needs)):
        end = max(end, start)
        while end < len(needs) and sums[end + 1] - sums[start] <= room:
            end += 1
        reach.append(end)
    return tuple(reach)


def fits(stages: Sequence[StageCosts], barred: AbstractSet[int] = frozenset()) -> bool:
    """Whether any cut gives each stage at least one layer and none more than it has room for."""
    count = len(stages[0].layers)
    allowed = ~sum(1 << end for end in barred)
    ends = 1  # bit k: the stages so far can hold exactly the first k layers
    for stage in stages:
        reachable = 0
        for start in range(count):
            if ends >> start & 1:
                reachable |= ((1 << (stage.reach[start] - start)) - 1) << (start + 1)
        ends = reachable & allowed
    return bool(ends >> count & 1)


def shortest_sum(
    stages: Sequence[StageCosts], barred: AbstractSet[int] = frozenset(), longest: int | None = None
) -> tuple[int, ...] | None:
    """Layers per stage with the smallest sum of costs, and among these the smallest maximum.

    Args:
        stages: costs by place in the pipeline, all of the same number of layers.
        barred: layers that no stage may begin with.
        longest: no stage may cost more than this.

    Returns:
        Layers of each stage, at least one; None where nothing fits.

    """
    count, last = len(stages[0].layers), len(stages) - 1
    best: list[tuple[int, int] | None] = [(0, 0)] + [None] * count
    came: list[list[int]] = []
    for place, stage in enumerate(stages):
        sums = list(accumulate(stage.layers, initial=0))
        now: list[tuple[int, int] | None] = [None] * (count + 1)
        origin = [0] * (count + 1)
        for start in range(place, count):
            before = best[start]
            if before is None:
                continue
            offset = sums[start] - stage.fixed
            total, peak = before
            for end in range(start + 1, min(stage.reach[start], count - last + place) + 1):
                cost = sums[end] - offset
                if longest is not None and cost > longest:
                    break
                if end in barred:
                    continue
                key = (total + cost, cost if cost > peak else peak)
                known = now[end]
                if known is None or key < known:
                    now[end] = key
                    origin[end] = start
        best = now
        came.append(origin)
    return None if best[count] is None else _trace(came, count)


def _trace(came: Sequence[Sequence[int]], count: int) -> tuple[int, ...]:
    ends = [count]
    for origin in reversed(came):
        ends.append(origin[ends[-1]])
    return tuple(end - start for start, end in pairwise(reversed(ends)))


def smallest_peak(
    stages: Sequence[StageCosts], barred: AbstractSet[int] = frozenset()
) -> tuple[int, ...] | None:
    """Layers per stage with the smallest maximum of costs, and among these the smallest sum."""
    count, last = len(stages[0].layers), len(stages) - 1
    best: list[int | None] = [0] + [None] * count
    for place, stage in enumerate(stages):
        sums = list(accumulate(stage.layers, initial=0))
        now: list[int | None] = [None] * (count + 1)
        for start in range(place, count):
            before = best[start]
            if before is None:
                continue
            offset = sums[start] - stage.fixed
            for end in range(start + 1, min(stage.reach[start], count - last + place) + 1):
                if end in barred:
                    continue
                cost = sums[end] - offset
                peak = cost if cost > before else before
                known = now[end]
                if known is None or peak < known:
                    now[end] = peak
        best = now
    return None if best[count] is None else shortest_sum(stages, barred, best[count])

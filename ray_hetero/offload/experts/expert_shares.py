"""How many of a layer's experts a GPU reads over its link in a step, by the step's tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from placement.plan.expert_split import ExpertTimes, best_split, splits
from ray_hetero.kernels.experts.expert_rates import STEP_TOKENS, CoreRates

Seconds = Callable[[int], float]
"""Function that gives the seconds for so many tokens; more take no less."""


@dataclass(frozen=True)
class ExpertShares:
    """The GPU's share of a layer's experts, which grows with the number of tokens."""

    count: int
    """Experts of the layer."""
    points: tuple[tuple[int, int], ...]
    """Tokens of a step, and how many experts the GPU computes from there on: both ascend."""

    def experts(self, tokens: int, count: int) -> int:
        """How many the GPU computes in a step of so many tokens, of a layer of so many experts."""
        at = bisect_right(self.points, tokens, key=lambda point: point[0])
        return self.points[at - 1][1] * count // self.count if at else 0

    @property
    def tokens(self) -> int:
        """Least tokens of a step of which the GPU computes something."""
        return self.points[0][0]

    @property
    def has_splits(self) -> bool:
        """Whether there are steps of which both compute something."""
        return self.points[0][1] < self.count

    @classmethod
    def found(
        cls,
        cores: CoreRates,
        handover: Seconds,
        link_s: float,
        *,
        count: int,
        most: int,
        asked: int | None = None,
    ) -> ExpertShares | None:
        """Shares with which sockets and GPU end together; None where the sockets are always faster.

        Args:
            cores: of the sockets, for all experts.
            handover: of tokens and sums.
            link_s: seconds of the GPU for all experts, whatever the number of tokens.
            count: experts of the layer.
            most: tokens of a step.
            asked: how many the GPU is to compute where that is faster than none.

        """
        allowed = splits(count) if asked is None else (0, asked)
        points, taken, slowest = [], 0, 0.0
        for tokens in range(STEP_TOKENS, most + STEP_TOKENS, STEP_TOKENS):
            # Where fewer tokens were measured to take longer, that was noise.
            slowest = max(slowest, cores.seconds(tokens))
            times = ExpertTimes(slowest, handover(tokens), link_s)
            best = best_split(times, allowed, count)
            if best > taken:
                points.append((tokens, best))
                taken = best
        return cls(count, tuple(points)) if points else None

    def described(self, sizes: Sequence[int]) -> str:
        """The shares in steps of some sizes, for people."""
        said = (f"{self.experts(size, self.count)} in steps of {size} tokens" for size in sizes)
        return f"of {self.count} experts of a layer {', '.join(said)}"

"""How long cores take for a layer's experts, by the number of tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

ROUNDS = 2
"""Rounds, of which the fastest counts: the first one reads memory that was never read before."""
STEP_TOKENS = 8
"""A share of the experts is chosen for multiples of these."""


@dataclass(frozen=True)
class CoreRates:
    """Seconds that cores take for a layer, measured."""

    points: tuple[tuple[int, float], ...]
    """Tokens, ascending, and seconds for them; at least one, and no more tokens are computed at
    once."""

    def seconds(self, tokens: int) -> float:
        """Seconds for a step of so many tokens: on lines through the points, from nothing on."""
        most, whole = self.points[-1]
        pieces, rest = divmod(tokens, most)
        before, took = 0, 0.0
        for at, seconds in self.points:
            if rest <= at:
                return pieces * whole + took + (seconds - took) * (rest - before) / (at - before)
            before, took = at, seconds
        return pieces * whole

    @classmethod
    def of_all(cls, rates: Iterable[CoreRates]) -> CoreRates:
        """Rates of ranks that compute together: the slowest's, all asked for the same."""
        points = zip(*(one.points for one in rates), strict=True)
        return cls(tuple(max(same, key=lambda point: point[1]) for same in points))


def measured(
    compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    hidden: int,
    experts: int,
    chosen: int,
    tokens: Sequence[int],
) -> CoreRates:
    """Measure a layer with tokens that choose evenly.

    Args:
        compute: sums [M, hidden] from tokens [M, hidden], bf16, weights and ids [M, chosen].
        hidden: size of a token.
        experts: of the layer.
        chosen: experts of a token.
        tokens: numbers of tokens, ascending.

    """
    points = []
    for count in tokens:
        given = random_tokens(count, hidden, experts, chosen)
        taken = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            compute(*given)
            taken.append(time.perf_counter() - began)
        points.append((count, min(taken)))
    return CoreRates(tuple(points))


def random_tokens(
    tokens: int, hidden: int, experts: int, chosen: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [M, hidden], bf16, with weights and ids [M, chosen] of experts chosen evenly."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    ids = torch.rand(tokens, experts, generator=generator).topk(chosen).indices.int()
    return x, torch.full(ids.shape, 1 / chosen), ids

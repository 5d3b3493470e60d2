"""Measured speed of a running server beside the plan's prediction, from its `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ray_hetero.cli.serving.server_process import fetched


@dataclass(frozen=True)
class Totals:
    """Sums of vLLM's metrics since the server's start, over all of its engines."""

    generated: float
    """Tokens that were generated."""
    steps: float
    """Steps of the engines."""
    between_s: float
    """Seconds between tokens, of all requests together."""
    firsts: float
    """Requests that got their first token."""
    first_s: float
    """Seconds from the arrivals of these requests to their first tokens."""

    def __sub__(self, earlier: Totals) -> Totals:
        """Sums since an earlier moment."""
        names = [field.name for field in fields(self)]
        return Totals(*(getattr(self, name) - getattr(earlier, name) for name in names))


NAMES = {
    "vllm:generation_tokens_total": "generated",
    "vllm:iteration_tokens_total_count": "steps",
    "vllm:inter_token_latency_seconds_sum": "between_s",
    "vllm:time_to_first_token_seconds_count": "firsts",
    "vllm:time_to_first_token_seconds_sum": "first_s",
}
"""Names of vLLM's metrics, and the field of `Totals` that sums each up."""


def read_totals(text: str) -> Totals:
    """Totals in the text of `/metrics`.

    Args:
        text: in Prometheus' format; a metric that is missing counts as 0.

    """
    return Totals(**sums_of(text, NAMES))


def sums_of(text: str, names: Mapping[str, str]) -> dict[str, float]:
    """Sums of metrics over all engines, by field.

    Args:
        text: of `/metrics`, in Prometheus' format; a metric that is missing counts as 0.
        names: field by the name of its metric.

    """
    sums = dict.fromkeys(names.values(), 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in names:
                sums[names[sample.name]] += sample.value
    return sums


def ask_totals(address: str) -> Totals | None:
    """Totals of a server; None if it does not answer.

    Args:
        address: URL of the server.

    """
    text = fetched(f"{address}/metrics")
    return None if text is None else read_totals(text.decode())


def predicted_rate(users: Sequence[Mapping[str, Any]], count: float) -> float:
    """Tokens per second of each of `count` users, as the plan predicts them.

    Args:
        users: the entries `users` of `ray-hetero plan --json`, the fewest users first.
        count: users, at least 1; seconds per token are interpolated between two entries.

    """
    points = [(float(row["users"]), 1 / float(row["tokens_per_s"])) for row in users]
    return 1 / interpolated(points, count)


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Value between two points, or that of the first or last one outside of them.

    Args:
        points: (place, value), at least one; places ascend.
        at: the place.

    """
    for (before, low), (behind, high) in pairwise(points):
        if at <= behind:
            return low + (high - low) * max(0.0, at - before) / (behind - before)
    return points[-1][1]


def compared(since: Totals, seconds: float, users: Sequence[Mapping[str, Any]]) -> str:
    """Line of measured and predicted speed; empty where nothing was generated.

    Args:
        since: totals of the last interval.
        seconds: length of the interval.
        users: see `predicted_rate`.

    """
    if since.generated <= 0 or since.between_s <= 0 or since.steps <= 0:
        return ""
    count = max(1.0, since.generated / since.steps)
    each = since.generated / since.between_s
    line = (
        f"{count:.1f} users a step: {each:.1f} tokens/s each, predicted "
        f"{predicted_rate(users, count):.1f}; {since.generated / seconds:.1f} tokens/s in all"
    )
    if since.firsts:
        line += f"; first token after {since.first_s / since.firsts:.2f} s"
    return line

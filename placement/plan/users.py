"""Speeds that several users see who are served at the same time by a split."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from placement.model.shape import ModelShape
from placement.plan.devices import Links
from placement.plan.passes import Pass, decode_pass, prefill_passes, prompts_passes
from placement.plan.planner import Planner
from placement.plan.split import Split


@dataclass(frozen=True)
class UserTimes:
    """Times of so many users, each with one sequence."""

    users: int
    context: int
    """Tokens of each sequence."""
    tokens_per_s: float
    """Tokens per second of each user, while all are answered."""
    total_per_s: float
    """Tokens per second of all users together."""
    first_token_s: float
    """Seconds until the last user's first token, if all prompts of `context` tokens arrive at
    once."""
    room: float
    """Sequences of `context` tokens that the KV cache has room for; users beyond it wait."""


def price_users(
    shape: ModelShape,
    split: Split,
    users: Iterable[int],
    *,
    kv_tokens: int,
    links: Links | None = None,
) -> tuple[UserTimes, ...]:
    """Price a split for several numbers of users, without drafts.

    Args:
        shape: the model; experts that lie on expert ranks are remote.
        split: devices, layers, and the tokens of each sequence.
        users: the numbers.
        kv_tokens: tokens that the KV cache holds.
        links: the ways between ranks.

    """
    context = split.work.context

    def of(number: int) -> UserTimes:
        decode = _seconds(shape, split, ((1, decode_pass(number, context)),), links)
        step_s = sum(decode)
        together = step_s if split.objective == "latency" else max(decode)
        prompts = prompts_passes(number, context, split.work.max_batched_tokens)
        first_token_s = sum(_seconds(shape, split, prompts, links))
        return UserTimes(
            number, context, 1 / step_s, number / together, first_token_s, kv_tokens / context
        )

    return tuple(map(of, users))


def first_token_s(
    shape: ModelShape, split: Split, tokens: int, links: Links | None = None
) -> float:
    """Seconds until the first token of a prompt that arrives alone.

    Args:
        shape: the model; experts that lie on expert ranks are remote.
        split: devices and layers.
        tokens: of the prompt.
        links: the ways between ranks.

    """
    passes = prefill_passes(tokens, split.work.max_batched_tokens)
    return sum(_seconds(shape, split, passes, links))


def _seconds(
    shape: ModelShape, split: Split, passes: Iterable[tuple[int, Pass]], links: Links | None
) -> list[float]:
    """Seconds of each stage for some passes, each so many times."""
    stages = tuple(stage.devices for stage in split.stages)
    planner = Planner(shape, stages, split.work, split.objective, links or Links())
    found = [0.0] * len(stages)
    for times, run in passes:
        for stage, seconds in enumerate(planner.pass_seconds(split.layers, run)):
            found[stage] += times * seconds
    return found

"""The longest sequence that a model is served with: how much of it fits, and what it costs.

Keys and values of one sequence of the longest length always have room, and where that is more than
the GPUs have beside the weights, layers or experts move to sockets.  Often a shorter length, or
keys and values in 8 bits, leaves them where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from placement.errors import DoesNotFitError, PlacementError
from placement.model.shape import ModelShape
from placement.words import duration, plural
from ray_hetero.errors import RayHeteroError
from ray_hetero.planning.engine_facts import EngineFacts
from ray_hetero.planning.planned_layers import LayerPlan
from ray_hetero.planning.split_search import WANTED_KV_TOKENS

LENGTH_STEP = 1024
"""The length that `auto` finds is a multiple of this, where it is not the model's own."""
SHORTEST = 2048
"""Tokens of the shortest length that is looked at."""
WORTH_SAYING = 0.8
"""Factor on the decode step, or on the first token, from which on a shorter length is proposed."""

PlanOf = Callable[[EngineFacts], LayerPlan]
"""Function that plans an engine with freely chosen stages."""


def with_fitting_length(facts: EngineFacts, plan: PlanOf) -> EngineFacts:
    """The facts with the longest length that fits, for `--max-model-len auto`.

    Layout and layers are those for sequences of usual length; what room they leave decides.

    Args:
        facts: with the model's own length.
        plan: for any length.

    Raises:
        DoesNotFitError: not even the shortest sequence fits.

    """
    longest, length = facts.max_model_len, min(facts.max_model_len, WANTED_KV_TOKENS)
    while True:
        try:
            found = plan(replace(facts, max_model_len=length))
            break
        except DoesNotFitError:
            if length <= SHORTEST:
                raise
            length = max(SHORTEST, length // 2)
    room = found.kv_tokens // LENGTH_STEP * LENGTH_STEP
    return replace(facts, max_model_len=min(longest, max(length, room)))


def shorter_context(
    facts: EngineFacts, found: LayerPlan | None, in_8_bits: ModelShape | None, plan: PlanOf
) -> str:
    """Remark about shorter sequences beside a plan; empty where they would gain little.

    Args:
        facts: of the plan.
        found: the plan; None where the model does not fit.
        in_8_bits: the model with keys and values in 8 bits; None where they are already, or its
            sizes cannot be told.
        plan: for other facts.

    """
    if found is not None and not (found.world.has_cpu or found.world.experts):
        return ""
    remarks = []
    for length in _shorter(facts.max_model_len):
        other = _planned(replace(facts, max_model_len=length), plan)
        if other is not None and _is_better(other, found):
            remarks.append(f"--max-model-len {length}: {_gain(other, found)}")
            break
    if in_8_bits is not None:
        other = _planned(replace(facts, shape=in_8_bits), plan)
        # Not every CPU rank has kernels for such a cache.
        if other is not None and not other.world.has_cpu and _is_better(other, found):
            remarks.append(f"--kv-cache-dtype fp8: {_gain(other, found)}")
    if not remarks:
        return ""
    return (
        f"The KV cache for {facts.max_model_len:,} tokens decides. With {'; with '.join(remarks)}."
    )


def _shorter(longest: int) -> Iterator[int]:
    length = 1 << max(longest - 1, 1).bit_length() - 1
    while length > SHORTEST:
        yield length
        length //= 2


def _planned(facts: EngineFacts, plan: PlanOf) -> LayerPlan | None:
    try:
        return plan(facts)
    except (PlacementError, RayHeteroError):
        return None


def _is_better(other: LayerPlan, found: LayerPlan | None) -> bool:
    if found is None:
        return True
    assert other.split is not None
    assert found.split is not None
    return other.split.step_s <= WORTH_SAYING * found.split.step_s


def _gain(other: LayerPlan, found: LayerPlan | None) -> str:
    assert other.split is not None
    line = other.world.layout.words
    if experts := len(other.world.experts):
        line += f" and {plural(experts, 'socket')} for experts"
    line += f", {duration(other.split.step_s)} a step"
    if found is None or found.split is None:
        return line
    return f"{line} instead of {duration(found.split.step_s)}"

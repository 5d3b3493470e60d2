"""Layers of each stage: the split that fits and makes the step shortest.

    work = Workload(batch=1, context=4096, max_sequences=4, max_model_len=4096)
    split = choose_split(shape, stages, work)
    split.order, split.layers, split.step_s, [rank.kv_bytes for rank in split.ranks]

Exact for any number of layers: sums over stages are cut by dynamic programming, and every order
of up to four stages is tried.  The same question always has the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from placement.errors import DoesNotFitError, LayoutError
from placement.model.shape import NO_PIPELINES, ModelShape
from placement.plan.devices import Links, StageDevices
from placement.plan.does_not_fit import brief, explain, explain_given
from placement.plan.drafts import (
    MOST_DRAFTS,
    Acceptance,
    Drafter,
    Drafting,
    SocketRows,
    Speculation,
    tokens_of_step,
)
from placement.plan.planner import Order, Planner
from placement.plan.stage_plan import Objective, RankPlan, Split, StagePlan
from placement.plan.workload import Workload
from placement.words import plural

__all__ = [
    "Objective",
    "Order",
    "RankPlan",
    "Split",
    "SplitOptions",
    "StagePlan",
    "choose_split",
    "price_drafts",
    "rows_of_sockets",
]


@dataclass(frozen=True)
class SplitOptions:
    """Choices of the user that a split keeps to."""

    objective: Objective = "latency"
    """Shortest step of one batch, or shortest slowest stage (stages overlap)."""
    order: Order = "auto"
    """Whether stages may be reordered (auto), or are taken as given (fixed)."""
    layers: tuple[int, ...] | None = None
    """Layers of each stage as given, in the order of the stages; None leaves them to be chosen."""


DEFAULTS = SplitOptions()


def choose_split(
    shape: ModelShape,
    stages: Sequence[StageDevices],
    work: Workload,
    options: SplitOptions = DEFAULTS,
    *,
    links: Links | None = None,
    explained: bool = True,
    drafter: Drafter | None = None,
) -> Split:
    """Choose stage order, layers per stage and budgets per rank.

    Args:
        shape: the model.
        stages: devices of each stage.
        work: the decode step that is priced, and what the KV cache must hold.
        options: what is not to be chosen.
        links: the ways between ranks.
        explained: whether the error says by how much it does not fit, which takes longer than the
            choice itself.
        drafter: of speculative decoding; decode steps are then those that verify its drafts.

    Raises:
        LayoutError: the layers given do not match the stages or the model, or there are too many
            stages.
        DoesNotFitError: no split fits; says by how much and what would fit.

    """
    _check_counts(shape, stages, work)
    planner = Planner(shape, tuple(stages), work, options.objective, links or Links(), drafter)
    if options.layers is not None:
        layers = _checked_layers(shape, stages, options.layers)
        return _given(planner, layers, explained=explained)
    refuse_barred(shape, len(stages))
    split = planner.best(options.order)
    if split is None:
        raise DoesNotFitError(explain(planner, options.order) if explained else brief(planner))
    return replace(split, gpu_only=_gpu_only(planner, split, options.order))


def refuse_barred(shape: ModelShape, stages: int) -> None:
    """Refuse more stages than a model can be divided into.

    Raises:
        DoesNotFitError: says which layers must be on one stage.

    """
    if stages > 1 and not shape.divides:
        raise DoesNotFitError(NO_PIPELINES)
    most = len(shape.layers) - len(shape.barred)
    if stages > most:
        first = min(use.earlier for use in shape.uses)
        last = max(use.layer for use in shape.uses)
        raise DoesNotFitError(
            f"{plural(stages, 'stage')} are asked for, but layers {first} to {last} of this model "
            f"use what earlier ones of them keep: it can be divided into {plural(most, 'stage')} "
            f"at most. Give --pipeline-parallel-size {most} or less."
        )


def _check_counts(shape: ModelShape, stages: Sequence[StageDevices], work: Workload) -> None:
    names = ("batch", "context", "max_sequences", "max_model_len", "max_batched_tokens")
    for name in names:
        if getattr(work, name) < 1:
            raise LayoutError(f"{name} must be 1 or more, got {getattr(work, name)}")
    if not 1 <= len(stages) <= len(shape.layers):
        raise LayoutError(
            f"{plural(len(stages), 'pipeline stage')} for "
            f"{plural(len(shape.layers), 'layer')}: expected 1 to "
            f"{len(shape.layers)} stages, each holds at least one layer"
        )
    sizes = [stage.size for stage in stages]
    if 0 in sizes:
        raise LayoutError(f"stages have {sizes} ranks; each needs at least one")


def _checked_layers(
    shape: ModelShape, stages: Sequence[StageDevices], layers: Sequence[int]
) -> tuple[int, ...]:
    if len(layers) != len(stages):
        raise LayoutError(
            f"layers {list(layers)} has {len(layers)} numbers, the pipeline has {len(stages)} "
            "stages: give one number per stage"
        )
    if sum(layers) != len(shape.layers) or min(layers) < 1:
        arithmetic = " + ".join(map(str, layers))
        raise LayoutError(
            f"layers {arithmetic} = {sum(layers)}, but the model has {len(shape.layers)} layers: "
            "the numbers must add up to that, and each stage needs at least one"
        )
    return tuple(layers)


def _given(planner: Planner, layers: tuple[int, ...], *, explained: bool) -> Split:
    split = planner.build(range(len(layers)), layers)
    if any(rank.kv_room < rank.memory.kv for rank in split.ranks):
        raise DoesNotFitError(explain_given(planner, split) if explained else brief(planner))
    return split


def _gpu_only(planner: Planner, split: Split, order: Order) -> Split | None:
    gpus = tuple(stage for stage in planner.stages if not stage.has_cpu)
    if not gpus or len(gpus) == len(planner.stages):
        return None
    alone = replace(planner, stages=gpus).best(order)
    return alone if alone is not None and alone.value <= split.value else None


def price_drafts(
    shape: ModelShape,
    split: Split,
    drafter: Drafter,
    acceptance: Acceptance,
    links: Links | None = None,
) -> Speculation:
    """Price decode steps with more and fewer drafts on the ranks and layers of a split.

    Args:
        shape: the model.
        split: with or without drafts.
        drafter: with the number of drafts that was asked for.
        acceptance: how often requests have drafts, and how often these are accepted.
        links: the ways between ranks.

    """

    def step_s(drafts: int) -> float:
        stages = tuple(stage.devices for stage in split.stages)
        with_drafts = replace(drafter, drafts=drafts) if drafts else None
        planner = Planner(shape, stages, split.work, split.objective, links or Links(), with_drafts)
        return planner.build(range(len(stages)), split.layers).step_s

    plain_s = step_s(0)

    def drafting(drafts: int) -> Drafting:
        tokens = tokens_of_step(drafts, acceptance.chance)
        return Drafting(
            drafts, acceptance.mean(plain_s, step_s(drafts)), acceptance.mean(1, tokens)
        )

    numbers = sorted({*range(MOST_DRAFTS + 1), drafter.drafts})
    known = {drafts: drafting(drafts) for drafts in numbers}
    best = min(known.values(), key=lambda one: (one.token_s, one.drafts))
    rows = tuple(dict.fromkeys(rows_of_sockets(split)))
    return Speculation(acceptance, known[drafter.drafts], known[0], best, rows)


def rows_of_sockets(split: Split) -> Iterator[SocketRows]:
    """Costs of rows on each socket of a split, those of expert ranks too."""
    for stage in split.stages:
        for rank in (*stage.devices.ranks, *stage.devices.experts):
            if rank.kind == "cpu":
                yield SocketRows(rank.node, rank.figures.name, rank.figures.row_costs)

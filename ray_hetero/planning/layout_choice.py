"""Stages of an engine for which nobody has asked: from the machine and the model.

A model that fits on one GPU, or on the fewest GPUs of one node, runs on them alone.  Otherwise
every layout worth a look is priced by `plan_layers`, as the engine itself would plan it, and the
shortest step wins among those whose first token comes in time.  Layouts whose ranks cannot compute
the model are refused by the rows of preflight/refusals.py, and never chosen.  For a model with
experts, GPUs with expert ranks beside them are looked at too;
they are chosen where `experts.ranks` is auto or a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from placement.cluster.assignment import Node, has_room, share_of
from placement.cluster.layout import Kind, Layout, divides_heads
from placement.errors import DoesNotFitError, PlacementError
from placement.model.config import UnknownModelError
from placement.model.shape import ModelShape
from placement.plan.encoders import are_on_gpu
from placement.plan.users import first_token_s
from placement.words import duration, plural
from ray_hetero.config import HeteroConfig, WorkloadConfig
from ray_hetero.errors import ConfigError, UnsupportedError
from ray_hetero.planning.expert_ranks import (
    check_has_experts,
    sockets_for_experts,
    with_expert_ranks,
)
from ray_hetero.planning.layer_plan import plan_layers
from ray_hetero.planning.plan_request import PlanRequest
from ray_hetero.planning.planned_layers import LayerPlan
from ray_hetero.planning.seat_devices import UnknownDeviceError
from ray_hetero.planning.split_search import PRICED_CONTEXT
from ray_hetero.planning.world_plan import with_chosen_sockets
from ray_hetero.preflight.refused_models import refuse_drafts, refuse_ranks

EXPERTS_KEY = '"experts": {"ranks": "auto"}'
"""Setting to type for layouts with expert ranks."""
WORTH_A_RANK = 0.99
"""Factor on the step of fewer ranks, which are taken where it is no longer than the shortest."""

NEARLY_AS_SOON = 1.1
"""Factor on the soonest first token, within which others count as in time where none is."""
SHORT_CONTEXT = 2048
"""Tokens of the one sequence with which a model is said to fit but for its KV cache."""

Stages = tuple[tuple[Kind, ...], ...]


@dataclass(frozen=True)
class Candidate:
    """A layout that was looked at."""

    layout: Layout
    experts: int = 0
    """Expert ranks beside it."""
    plan: LayerPlan | None = None
    """Layers of the layout; None where it does not fit, or cannot be priced."""
    problem: str = ""
    """Why there is no plan."""
    is_unknown: bool = False
    """Whether that is because speed or memory of a device is not known."""
    is_refused: bool = False
    """Whether that is because these ranks cannot compute the model."""
    first_token_s: float = 0
    """Seconds until the first token of a prompt of usual length (`PRICED_CONTEXT`)."""

    @property
    def step_s(self) -> float:
        """Seconds of the decode step that was priced; of the slowest stage for throughput."""
        assert self.plan is not None
        assert self.plan.split is not None
        split = self.plan.split
        return split.step_s if split.objective == "latency" else split.slowest_s

    def __str__(self) -> str:
        return f"{self.words} – {duration(self.step_s)}"

    @property
    def name(self) -> str:
        """The stages as the configuration has them, and the number of expert ranks."""
        if not self.experts:
            return str(self.layout)
        return f"{self.layout} + {plural(self.experts, 'expert rank')}"

    @property
    def words(self) -> str:
        """The stages and the expert ranks, for people."""
        if not self.experts:
            return self.layout.words
        layers = (
            "" if self.plan is None else f" of {plural(self.plan.world.expert_layers, 'layer')}"
        )
        return f"{self.layout.words}, experts{layers} on {plural(self.experts, 'socket')}"


@dataclass(frozen=True)
class Choice:
    """Chosen layout, and the other ones."""

    chosen: Candidate
    others: tuple[Candidate, ...]
    """The other layouts that fit, the shortest step first, then those that do not fit."""
    why: str
    unasked: tuple[Candidate, ...] = ()
    """Layouts with expert ranks, which nobody has asked for; in the same order."""

    def __str__(self) -> str:
        """The one line for the log."""
        line = f"{self.chosen} a step; {self.why}"
        fitting = [other for other in self.others if other.plan is not None]
        if fitting:
            line += f". Runner-up: {fitting[0]}"
        else:
            line += ". Nothing else fits" if self.others else ". There is nothing else to choose"
        shorter = self.shorter_with_experts
        return line if shorter is None else f"{line}. Predicted for {EXPERTS_KEY}: {shorter}"

    @property
    def shorter_with_experts(self) -> Candidate | None:
        """Layout that asking for expert ranks would choose; None where its step is not shorter."""
        fitting = [one for one in self.unasked if one.plan is not None]
        found = fitting[0] if fitting else None
        return None if found is None or found.step_s >= self.chosen.step_s else found


def choose_layout(request: PlanRequest, *, engines: int = 1) -> Choice:
    """Choose the stages for an engine of which nobody has said any.

    Args:
        request: its layout and sizes are not looked at.
        engines: engines that start together; there must be room for all.

    Raises:
        UnknownModelError: the model's sizes are not known.
        UnknownDeviceError: speed or memory of a device is not known.
        UnsupportedError: what fits cannot compute the model.
        ConfigError: expert ranks are asked for where they have nothing to do.
        LayoutError: there are fewer devices than expert ranks that are asked for.
        DoesNotFitError: no layout fits; the error of the one with the most ranks.

    """
    shape = request.facts.shape
    if shape is None:
        raise UnknownModelError(request.facts.why_no_shape)
    asked = request.config.experts.ranks
    check_has_experts(0 if asked == "auto" else asked, shape)
    free = with_chosen_sockets(request.config.cpu, request.machine.nodes)
    request = replace(request, machine=replace(request.machine, nodes=tuple(free)), explained=False)

    def priced(layout: Layout, experts: int) -> Candidate:
        return _unless_refused(_priced(request, layout, experts), request)

    layouts = [
        one
        for one in layouts_to_try(share_of(free, engines), shape)
        if engines == 1 or has_room(one, free, engines)
    ]
    found = [priced(*one) for one in with_experts_to_try(free, shape, layouts, asked)]
    unasked: list[Candidate] = []
    if asked in (0, "auto"):
        # Where all experts fit on the GPUs there are none, which is a layout of its own already.
        with_experts = [one for one in found if one.plan is None or one.experts]
        found = [priced(one, 0) for one in layouts]
        if asked == 0:
            unasked = with_experts
        else:
            found += with_experts
    if unknown := [one for one in found if one.is_unknown]:
        raise UnknownDeviceError(unknown[0].problem)
    fitting = [one for one in found if one.plan is not None]
    if not fitting:
        _say_what_does_not_fit(found, request)
    chosen, why = _best(fitting, found, request)
    others = [one for one in found if one is not chosen]
    return Choice(chosen, _ordered(others), why, _ordered(unasked))


def _best(
    fitting: Sequence[Candidate], found: Sequence[Candidate], request: PlanRequest
) -> tuple[Candidate, str]:
    """The candidate to take out of those that fit, and why."""
    alone = [one for one in fitting if _is_gpus_alone(one)]
    if alone and len(alone[0].layout.stages) == 1:
        gpus = "one GPU" if alone[0].layout.world_size == 1 else "GPUs"
        return alone[0], f"the model fits on {gpus} alone"
    limit_s = request.config.workload.first_token_s
    sooner = _shortest(_in_time(fitting, limit_s))
    assert request.facts.shape is not None
    if request.facts.shape.has_encoders:
        fitting = _with_encoders_on_gpu(fitting)
    chosen = _shortest(_in_time(fitting, limit_s))
    short = _with_short_context(request)
    holds_weights = any(
        _priced(short, one.layout, 0).plan
        for one in found
        if _is_gpus_alone(one) and one.plan is None and not one.is_refused
    )
    why = _reason(chosen, found, holds_weights=holds_weights)
    if chosen is not sooner:
        why += " of those whose first stage, which encodes images and sound, is a GPU"
    if chosen is not _shortest(fitting):
        why += f" with a first token within {limit_s:g} s (workload.first_token_s), or the soonest"
    return chosen, why


def _with_encoders_on_gpu(fitting: Sequence[Candidate]) -> list[Candidate]:
    """The candidates but those whose first stage, which encodes images, is a socket beside GPUs.

    All of them where no other one has a GPU.
    """
    kept = [one for one in fitting if are_on_gpu(one.layout)]
    return kept if any(one.layout.count("gpu") for one in kept) else list(fitting)


def _with_short_context(request: PlanRequest) -> PlanRequest:
    """The request for one short sequence, for which a model fits that does but for its KV cache."""
    brief = request.config.model_copy(update={"workload": WorkloadConfig()})
    length = min(SHORT_CONTEXT, request.facts.max_model_len)
    return replace(request, config=brief, facts=replace(request.facts, max_model_len=length))


def _is_gpus_alone(one: Candidate) -> bool:
    return not (one.layout.count("cpu") or one.experts)


def refuse_planned(request: PlanRequest, layout: Layout, experts: int) -> None:
    """Raise for a plan whose ranks cannot compute the model, or not verify its drafts.

    Args:
        request: with the checkpoint; without one nothing is refused.
        layout: stages of the plan.
        experts: number of expert ranks.

    Raises:
        UnsupportedError: says what does not work, and what to do instead.

    """
    if request.checkpoint is None:
        return
    refuse_ranks(request.checkpoint, layout, experts)
    refuse_drafts(
        layout,
        has_states=request.facts.drafts_behind_states,
        has_draft_model=request.facts.has_draft_model,
    )


def _unless_refused(found: Candidate, request: PlanRequest) -> Candidate:
    """A candidate that fits, or whose speed is not known, unless its ranks are refused."""
    if found.plan is None and not found.is_unknown:
        return found
    try:
        refuse_planned(request, found.layout, found.experts)
    except UnsupportedError as error:
        return replace(found, plan=None, problem=str(error), is_unknown=False, is_refused=True)
    return found


def _say_what_does_not_fit(found: Sequence[Candidate], request: PlanRequest) -> None:
    """Raise for candidates none of which can be taken."""
    asked = request.config.experts.ranks
    if not found and asked not in (0, "auto"):
        raise ConfigError(
            f"experts.ranks: {asked} sockets are to hold experts beside stages of GPUs, but no GPU "
            "is free. Leave experts.ranks out."
        )
    if not found:
        raise DoesNotFitError("there is no device to plan on")
    refused = [one for one in found if one.is_refused]
    others = [one for one in found if not one.is_refused]
    if not others:
        raise UnsupportedError(refused[0].problem)
    widest = max(others, key=lambda one: one.layout.world_size)
    explained = replace(request, explained=True).with_experts(widest.experts)
    try:
        problem = plan_layers(explained.with_layout(widest.layout)).warning
    except DoesNotFitError as error:
        problem = str(error)
    problem = problem or widest.problem
    if refused:
        problem += f"\nOther layouts are refused: {refused[0].problem}"
    raise DoesNotFitError(problem)


def _in_time(fitting: Sequence[Candidate], limit_s: float) -> list[Candidate]:
    """The candidates whose first token comes in time; those with the soonest where none does."""
    soonest = min(one.first_token_s for one in fitting)
    limit_s = max(limit_s, NEARLY_AS_SOON * soonest)
    return [one for one in fitting if one.first_token_s <= limit_s]


def _ordered(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Candidates that fit, the shortest step first, then those that do not."""
    return tuple(
        sorted(candidates, key=lambda one: (one.plan is None, one.step_s if one.plan else 0.0))
    )


def _reason(chosen: Candidate, found: Sequence[Candidate], *, holds_weights: bool) -> str:
    """Why a layout was chosen, where the GPUs of one node do not serve the model alone.

    Args:
        chosen: the layout.
        found: all that were looked at.
        holds_weights: whether it is only for the KV cache that GPUs alone do not suffice.

    """
    layout, step = chosen.layout, "this is the shortest step"
    if chosen.experts or (layout.count("gpu") and layout.count("cpu")):
        if any(one.plan is not None and _is_gpus_alone(one) for one in found):
            return f"the model does not fit on the GPUs of one node alone, and {step}"
        if holds_weights:
            return (
                "the weights fit on the GPUs alone, but not with the KV cache that is asked for, "
                f"and {step}"
            )
        return f"the model does not fit on the GPUs alone, and {step}"
    if layout.count("gpu"):
        return "the model does not fit on the GPUs of one node"
    has_gpus = any(one.layout.count("gpu") for one in found)
    if has_gpus:
        return "nothing that fits is faster with a GPU"
    return "no GPU is free" if layout.world_size > 1 else "no GPU is free, one socket is enough"


def _shortest(fitting: Sequence[Candidate]) -> Candidate:
    """The shortest step; of nearly equal ones the one with the fewest ranks."""
    best = min(one.step_s for one in fitting)
    near = [one for one in fitting if WORTH_A_RANK * one.step_s <= best]
    return min(near, key=lambda one: (one.layout.world_size + one.experts, one.step_s))


def _priced(request: PlanRequest, layout: Layout, experts: int) -> Candidate:
    facts = request.facts
    try:
        plan = plan_layers(request.with_experts(experts).with_layout(layout))
    except PlacementError as error:
        return Candidate(layout, experts, problem=str(error))
    if plan.split is None:
        problem = plan.warning or plan.unknown
        return Candidate(layout, experts, problem=problem, is_unknown=not plan.is_too_large)
    assert facts.shape is not None
    if problem := facts.shape.why_not_divided(plan.world.layers):
        return Candidate(layout, experts, problem=problem, is_refused=True)
    tokens = min(PRICED_CONTEXT, facts.max_model_len)
    seconds = first_token_s(plan.shape(facts.shape), plan.split, tokens, request.machine.links)
    # All experts may fit on the GPUs.
    return Candidate(layout, len(plan.world.experts), plan, first_token_s=seconds)


def layouts_to_try(nodes: Sequence[Node], shape: ModelShape) -> list[Layout]:
    """Layouts worth a look on these nodes, no two alike: fewer GPUs first."""
    layouts: dict[Stages, None] = {}
    for stages in _stages(nodes, shape):
        if 0 < len(stages) <= len(shape.layers):
            layouts.setdefault(stages)
    return [Layout(stages) for stages in layouts]


def _stages(nodes: Sequence[Node], shape: ModelShape) -> Iterator[Stages]:
    ordered = sorted(nodes, key=lambda node: (not node.is_driver, node.address))
    gpus = [_sizes(node.gpus, shape) for node in ordered if node.gpus]
    sockets = [_sizes(len(node.sockets), shape) for node in ordered if node.sockets]
    for sizes in gpus:
        yield from (_row("gpu", [size]) for size in sizes)
    all_gpus = _row("gpu", [sizes[-1] for sizes in gpus])
    yield all_gpus
    wide = _row("cpu", [sizes[-1] for sizes in sockets])
    narrow = _row("cpu", [1 for node in ordered for _ in node.sockets])
    for row in (wide[:1], wide, narrow[:1], narrow):
        yield from (all_gpus + row, row + all_gpus)
    for sizes in sockets:
        yield from (_row("cpu", [size]) for size in sizes)


def _row(kind: Kind, sizes: Sequence[int]) -> Stages:
    return tuple((kind,) * size for size in sizes)


def _sizes(devices: int, shape: ModelShape) -> list[int]:
    """Numbers of ranks that a stage on so many devices of a node can have."""
    return [
        size
        for size in range(1, devices + 1)
        if divides_heads(size, shape.num_heads, shape.num_kv_heads)
    ]


def with_experts_to_try(
    nodes: Sequence[Node],
    shape: ModelShape,
    layouts: Sequence[Layout],
    asked: int | Literal["auto"],
) -> list[tuple[Layout, int]]:
    """Single stages of GPUs, with the number of expert ranks beside each that is worth a look.

    All ranks are on one node then, and so is a stage.

    Args:
        nodes: the cluster.
        shape: the model.
        layouts: of `layouts_to_try`.
        asked: `experts.ranks`; 0 and auto are as many as there are sockets.

    """
    found = []
    for layout in layouts:
        sockets = sockets_for_experts(nodes, layout.world_size, shape)
        ranks = sockets if asked in (0, "auto") else int(asked)
        if len(layout.stages) == 1 and set(layout.kinds) == {"gpu"} and ranks:
            found.append((layout, ranks))
    return found


def layout_of(choice: Choice) -> list[list[Kind]]:
    """The chosen stages as the configuration has them."""
    return [list(stage) for stage in choice.chosen.layout.stages]


def config_of(choice: Choice, config: HeteroConfig) -> HeteroConfig:
    """The configuration with the choice written out."""
    chosen = with_expert_ranks(config, choice.chosen.experts)
    return chosen.model_copy(update={"layout": layout_of(choice)})

"""Stages of an engine for which nobody has asked: from the machine and the model.

A model that fits on one GPU, or on the fewest GPUs of one node, runs on them alone.  Otherwise
every layout worth a look is priced by `plan_layers`, as the engine itself would plan it, and the
shortest step wins.  For a model with experts, GPUs with expert ranks beside them are looked at too;
they are chosen where `experts.ranks` is auto or a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from placement.cluster.assignment import Node
from placement.cluster.layout import Kind, Layout, divides_heads
from placement.errors import DoesNotFitError, PlacementError
from placement.model.shape import ModelShape
from placement.words import duration, plural
from ray_hetero.config import HeteroConfig
from ray_hetero.planning.engine_facts import EngineFacts
from ray_hetero.planning.expert_ranks import sockets_for_experts, with_expert_ranks
from ray_hetero.planning.layer_plan import Measure, plan_layers
from ray_hetero.planning.planned_layers import LayerPlan
from ray_hetero.planning.world_plan import with_chosen_sockets

EXPERTS_KEY = '"experts": {"ranks": "auto"}'
"""Setting to type for layouts with expert ranks."""
WORTH_A_RANK = 0.99
"""Factor on the step of fewer ranks, which are taken where it is no longer than the shortest."""

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
    """What was chosen and what else there was."""

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
        """What would be chosen if somebody asked for expert ranks; None where it is not shorter."""
        fitting = [one for one in self.unasked if one.plan is not None]
        found = fitting[0] if fitting else None
        return None if found is None or found.step_s >= self.chosen.step_s else found


def choose_layout(
    config: HeteroConfig, nodes: Sequence[Node], facts: EngineFacts, *, measure: Measure, **how: Any
) -> Choice | None:
    """Choose the stages for an engine of which nobody has said any.

    Args:
        config: the user's configuration; its layout is not looked at.
        nodes: the cluster.
        facts: the model and the engine.
        measure: as of `plan_layers`.
        how: further arguments of `plan_layers`.

    Returns:
        None where nothing is known to choose by: the model's sizes, or any device's speed.

    Raises:
        DoesNotFitError: no layout fits; the error of the one with the most ranks.

    """
    if facts.shape is None or config.layers != "auto":
        return None
    free = with_chosen_sockets(config.cpu, nodes)

    def priced(layout: Layout, experts: int, *, explained: bool = False) -> Candidate:
        asked = with_expert_ranks(config, experts)
        return _priced(layout, asked, free, facts, measure, how | {"explained": explained})

    asked = config.experts.ranks
    layouts = layouts_to_try(free, facts.shape)
    found = [priced(*one) for one in with_experts_to_try(free, facts.shape, layouts, asked)]
    unasked: list[Candidate] = []
    if asked in (0, "auto"):
        # Where all experts fit on the GPUs there are none, which is a layout of its own already.
        with_experts = [one for one in found if one.plan is None or one.experts]
        found = [priced(one, 0) for one in layouts]
        if asked == 0:
            unasked = with_experts
        else:
            found += with_experts
    fitting = [one for one in found if one.plan is not None]
    if any(one.is_unknown for one in found):
        return None
    if not fitting:
        if not found:
            raise DoesNotFitError("there is no device to plan on")
        widest = max(found, key=lambda one: one.layout.world_size)
        raise DoesNotFitError(priced(widest.layout, widest.experts, explained=True).problem)
    alone = [one for one in fitting if not (one.layout.count("cpu") or one.experts)]
    if alone and len(alone[0].layout.stages) == 1:
        chosen = alone[0]
        gpus = "one GPU" if chosen.layout.world_size == 1 else "GPUs"
        why = f"the model fits on {gpus} alone"
    else:
        chosen = _shortest(fitting)
        why = _reason(chosen, found)
    others = [one for one in found if one is not chosen]
    return Choice(chosen, _ordered(others), why, _ordered(unasked))


def _ordered(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Candidates that fit, the shortest step first, then those that do not."""
    return tuple(
        sorted(candidates, key=lambda one: (one.plan is None, one.step_s if one.plan else 0.0))
    )


def _reason(chosen: Candidate, found: Sequence[Candidate]) -> str:
    layout = chosen.layout
    if chosen.experts or (layout.count("gpu") and layout.count("cpu")):
        return "the model does not fit on the GPUs alone, and this is the shortest step"
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


def _priced(
    layout: Layout,
    config: HeteroConfig,
    nodes: Sequence[Node],
    facts: EngineFacts,
    measure: Measure,
    how: dict[str, Any],
) -> Candidate:
    stages = [list(stage) for stage in layout.stages]
    experts = config.experts.ranks
    assert experts != "auto", "candidates have a number each"
    try:
        plan = plan_layers(
            config.model_copy(update={"layout": stages}),
            nodes,
            facts,
            pipeline_parallel_size=len(stages),
            tensor_parallel_size=layout.tensor_parallel_size,
            partition=None,
            measure=measure,
            **how,
        )
    except PlacementError as error:
        return Candidate(layout, experts, problem=str(error))
    if plan.split is None:
        problem = plan.warning or plan.unknown
        return Candidate(layout, experts, problem=problem, is_unknown=not plan.is_too_large)
    # All experts may fit on the GPUs.
    return Candidate(layout, len(plan.world.experts), plan)


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

"""Description of an engine: known when its devices are claimed, the same until it ends."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from placement.model.shape import remote_layers
from placement.plan.picture import plan_svg
from placement.plan.plan import Plan
from ray_hetero.names import actor_name

if TYPE_CHECKING:
    from placement.cluster.assignment import Seat
    from placement.model.shape import ModelShape
    from ray_hetero.planning.planned_layers import LayerPlan


@dataclass(frozen=True)
class RankInfo:
    """Place of a rank and what it holds."""

    rank: int
    stage: int | None
    """Number of the rank's pipeline stage; None for an expert rank."""
    tensor_rank: int
    kind: str
    node: str
    device: str
    threads: tuple[int, ...]
    """Logical CPUs that a CPU rank computes on; none for a GPU rank."""
    first_layer: int
    layers: int
    actor: str
    """Name of the rank's actor in `ray list actors`."""
    predicted_ms: float | None
    """The decode step that the plan has priced, on this rank's stage."""


@dataclass(frozen=True)
class EngineInfo:
    """An engine and its ranks."""

    engine: str
    """vLLM's instance id, part of the names of its actors."""
    model: str
    pid: int
    """Process of the driver: vLLM's engine core, or the user's own."""
    started: float
    """Seconds since the epoch."""
    ranks: tuple[RankInfo, ...]
    picture: str
    """The plan as SVG; empty where nothing is known to plan from."""
    metrics_path: str = ""
    """File on this host where the server reads the ranks' figures; empty for none."""


def info_of(
    instance_id: str,
    model: str,
    plan: LayerPlan,
    shape: ModelShape | None,
    metrics_path: str = "",
) -> EngineInfo:
    """Describe the engine whose driver is this process.

    Args:
        instance_id: vLLM's.
        model: path or name, as the user gave it.
        plan: devices, layers and threads of its ranks.
        shape: sizes of the model; None where they are unknown.
        metrics_path: where the server reads the figures of the ranks.

    """
    world, first_layers = plan.world, [0, *accumulate(plan.world.layers)]
    ranks = []
    for seat in world.seats:
        forecast, layers = plan.forecast(seat.rank), world.layers[seat.stage]
        held = range(first_layers[seat.stage], first_layers[seat.stage] + layers)
        step_s = None if forecast is None else forecast.step_s
        ranks.append(_rank(instance_id, plan, seat, seat.stage, held, step_s))
    remote = remote_layers(sum(world.layers), world.expert_layers)
    ranks += [
        _rank(instance_id, plan, seat, None, remote, plan.expert_step_s) for seat in world.experts
    ]
    return EngineInfo(
        engine=instance_id,
        model=model,
        pid=os.getpid(),
        started=time.time(),
        ranks=tuple(ranks),
        picture=_picture(model, plan, shape),
        metrics_path=metrics_path,
    )


def _rank(
    instance_id: str, plan: LayerPlan, seat: Seat, stage: int | None, layers: range,
    step_s: float | None,
) -> RankInfo:  # fmt: skip
    """Describe a rank; of an expert rank the layers are those whose experts it holds."""
    return RankInfo(
        rank=seat.rank,
        stage=stage,
        tensor_rank=seat.tensor_rank,
        kind="experts" if stage is None else seat.kind,
        node=seat.node_name,
        device=seat.device,
        threads=plan.threads.get(seat.rank, ()),
        first_layer=layers.start,
        layers=len(layers),
        actor=actor_name(instance_id, seat),
        predicted_ms=None if step_s is None else 1000 * step_s,
    )


def _picture(model: str, plan: LayerPlan, shape: ModelShape | None) -> str:
    split = plan.split
    if split is None or shape is None:
        return ""
    devices = tuple(rank.device for rank in split.ranks)
    devices += tuple(one.device for one in plan.experts)
    return plan_svg(Plan(Path(model).name, shape, split, devices, experts=plan.experts))

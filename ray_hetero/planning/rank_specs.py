"""Specifications of the ranks' processes, from the plan and its nodes."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from placement.cluster.assignment import Node, Seat
from placement.host.cpulist import format_cpulist
from placement.host.topology import Host
from ray_hetero.planning import world_plan
from ray_hetero.planning.planned_layers import LayerPlan
from ray_hetero.world import EngineSpec, ExpertSource, RankSpec, SharedSettings


def rank_specs(
    plan: LayerPlan,
    nodes: Sequence[Node],
    engine: EngineSpec,
    shared: SharedSettings,
    source: ExpertSource | None = None,
) -> tuple[RankSpec, ...]:
    """Put together what each rank is told, by rank.

    Args:
        plan: seats, layers and threads.
        nodes: the cluster that the plan was made for.
        engine: what was asked for.
        shared: what all ranks have in common with the driver.
        source: of experts that expert ranks load without vLLM; None for others.

    """
    hosts = {node.node_id: node.host for node in nodes}
    spare = {node.node_id: spare_cpus(plan, node) for node in nodes}
    near_gpus = {
        node.node_id: world_plan.cpus_near_gpus(
            node.host,
            _computing(plan, node),
            engine.config.cpu,
            is_driver_node=node.is_driver,
        )
        for node in nodes
    }
    own = {node.node_id: _with(spare[node.node_id], _computing(plan, node)) for node in nodes}
    own_near_gpus = {
        node.node_id: world_plan.cpus_on_nodes_of_gpus(node.host, own[node.node_id])
        for node in nodes
    }
    meeting = uuid.uuid4().hex
    return tuple(
        RankSpec(
            world=plan.world,
            seat=seat,
            engine=engine,
            shared=shared,
            threads=plan.threads.get(seat.rank, ()),
            spare=spare[seat.node_id],
            own=own[seat.node_id],
            forecast=plan.forecast(seat.rank),
            gpus_beside=world_plan.gpus_beside(seat, hosts[seat.node_id]),
            near_gpus=near_gpus[seat.node_id],
            own_near_gpus=own_near_gpus[seat.node_id],
            place=place_of(plan, seat, hosts[seat.node_id], engine),
            gpu=plan.expert_gpu if plan.world.experts else None,
            source=source if seat.serves_experts else None,
            meeting=meeting,
        )
        for seat in plan.world.members
    )


def place_of(plan: LayerPlan, seat: Seat, host: Host, engine: EngineSpec) -> str:
    """Name of a CPU rank's place; measured times depend on it beside kernels and weights."""
    if seat.kind != "cpu":
        return ""
    beside = [
        f"stage {other.stage} on CPUs {format_cpulist(plan.threads.get(other.rank, ()))}"
        for other in plan.world.members
        if other.kind == "cpu" and other.node_id == seat.node_id and other.rank != seat.rank
    ]
    own = f"stage {seat.stage} on CPUs {format_cpulist(plan.threads.get(seat.rank, ()))}"
    model = host.cpu_model or "unknown CPU"
    return ", ".join([f"{model}, OpenMP {engine.config.cpu.openmp}, {own}", *beside])


def spare_cpus(plan: LayerPlan, node: Node) -> tuple[int, ...]:
    """Logical CPUs of a node that no CPU rank of this engine computes on; may be none."""
    seats = [seat for seat in plan.world.members if seat.node_id == node.node_id]
    sockets = [seat for seat in seats if seat.kind == "cpu"]
    return world_plan.spare_cpus(sockets, _computing(plan, node))


def _computing(plan: LayerPlan, node: Node) -> list[tuple[int, ...]]:
    """Logical CPUs of each CPU rank's compute threads on a node."""
    return [
        plan.threads[seat.rank]
        for seat in plan.world.members
        if seat.node_id == node.node_id and seat.kind == "cpu"
    ]


def _with(spare: tuple[int, ...], threads: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Spare logical CPUs and those of compute threads; none where none compute."""
    return tuple(sorted({*spare, *(cpu for cpus in threads for cpu in cpus)})) if threads else ()

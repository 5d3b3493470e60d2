"""Devices of all ranks, with their figures in the stages that they are in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from placement.cluster.assignment import Node, Seat
from placement.cluster.layout import Kind
from placement.host.row_costs import RowCosts
from placement.host.topology import Host
from placement.plan.devices import DeviceFigures, RankDevice, StageDevices, stages_of
from placement.units import GIB
from ray_hetero.config import HeteroConfig
from ray_hetero.planning.expert_ranks import with_expert_buffer
from ray_hetero.planning.machine import Threads
from ray_hetero.planning.plan_request import PlanRequest
from ray_hetero.planning.prompt_gpus import (
    can_fuse,
    has_whole_layers,
    prompt_gpu_bytes,
    ranks_of_prompt_gpu,
    with_prompt_gpus,
)
from ray_hetero.planning.seat_devices import gpu_device, socket_device
from ray_hetero.planning.sockets import expanded, read_share, streams_weights
from ray_hetero.world import World


@dataclass(frozen=True)
class Latency:
    """Cost of a step beside bytes and operations, in seconds."""

    layer_s: float
    step_s: float


LATENCIES: dict[tuple[Kind, bool], Latency] = {
    ("cpu", False): Latency(0.7e-3, 1.5e-3),
    ("cpu", True): Latency(0.8e-3, 2e-3),
    ("gpu", False): Latency(0.02e-3, 1.7e-3),
    ("gpu", True): Latency(0.35e-3, 4e-3),
}
"""Compiled and eager; from decode steps of 8B- and 1B-shaped stages of 1 to 31 layers on an H200
and 14 cores beside it (docs/gpu-host/2026-11-22-h200.md), what is left when weights are read at the
measured bandwidth.  A CPU layer costs less where weights do not drive Python from the caches."""
FUSED = Latency(0.08e-3, 1.5e-3)
"""Latency of a CPU rank whose layers are one operator, compiled or not: barriers, attention of one
token, norms and activation, from marks in the kernels with 15 and 30 threads
(docs/gpu-host/2026-11-28-one-gpu.md).  It does not grow with the layer."""
FUSED_READING = 0.87
"""Share of the probe's bandwidth at which these layers read; median of decode steps of half an 8B
shape in three formats, beside an H100 or H200 (benchmarks/results/gpu-host, 22 to 27 November,
steps without columns on the GPU).  By marks in the kernels it is 0.76 to 0.86."""
EXPERT_LAYER = Latency(0.03e-3, 0.0)
"""Latency of an expert rank: time of a call for a layer's experts beside its reads.  An expert of
2048 x 64 took 31 µs for one token on 22 cores, of which reading it takes four
(docs/gpu-host/2026-11-26-h200.md)."""


@dataclass(frozen=True)
class RankSpeeds:
    """Threads and measured speeds of CPU ranks and expert ranks, by rank."""

    threads: Threads
    """Logical CPUs of the compute threads."""
    bandwidth: Mapping[int, float] = field(default_factory=dict)
    """Measured bytes per second."""
    row_costs: Mapping[int, RowCosts] = field(default_factory=dict)
    """Costs of several rows; those of a description win."""

    @classmethod
    def measured(cls, request: PlanRequest, world: World, threads: Threads) -> RankSpeeds:
        """Measure what neither the configuration nor the model of a device tells."""
        config, facts, machine = request.config, request.facts, request.machine
        has_sockets = world.has_cpu or bool(world.experts)
        known = config.cpu.bandwidth_gb_s is not None or not has_sockets
        bandwidth = {} if known else machine.measure(world.members, threads)
        verifies = facts.drafter is not None and facts.is_bf16 and has_sockets
        probe = machine.measure_rows if verifies else None
        return cls(threads, bandwidth, {} if probe is None else probe(world.members, threads))


def stage_devices(request: PlanRequest, world: World, threads: Threads) -> tuple[StageDevices, ...]:
    """The devices of each stage, with GPUs for prompts and expert ranks.

    Args:
        request: with the sizes of the model.
        world: ranks of the engine.
        threads: logical CPUs of each CPU rank's compute threads, by rank.

    Raises:
        UnknownDeviceError: speed or memory of a device is not known.

    """
    config, facts = request.config, request.facts
    speeds = RankSpeeds.measured(request, world, threads)
    devices = rank_devices(request, world, speeds)
    experts = expert_devices(request, world, speeds)
    stages = with_prompt_gpus(stages_of(devices, world.layout.sizes), request, world)
    slots = int(config.experts.slots_gib * GIB) if experts else 0
    stages = tuple(replace(stage, experts=experts, slot_bytes=slots) for stage in stages)
    assert facts.shape is not None
    nodes, links = request.machine.nodes, request.machine.links
    if not (experts and can_read_experts(config, world.experts, nodes, is_bf16=facts.is_bf16)):
        return stages
    tokens = facts.max_num_batched_tokens
    return tuple(
        with_expert_buffer(stage, config.experts, facts.shape, tokens, links) for stage in stages
    )


def rank_devices(request: PlanRequest, world: World, speeds: RankSpeeds) -> tuple[RankDevice, ...]:
    """The device of each rank with its figures, by rank.

    Figures of the configuration win over measured ones, and these over known parts.

    Args:
        request: with the sizes of the model.
        world: ranks of the engine.
        speeds: of the CPU ranks.

    Raises:
        UnknownDeviceError: speed or memory of a device is not known.

    """
    config, facts, seats = request.config, request.facts, world.seats
    machine = request.machine
    hosts = {node.node_id: node.host for node in machine.nodes}
    ranks_on_node = Counter(seat.node_id for seat in seats if seat.kind == "cpu")
    is_whole = has_whole_layers(config, facts, world)
    prompt_bytes = prompt_gpu_bytes(facts, world, is_whole=is_whole)

    def device_of(seat: Seat) -> RankDevice:
        host, said = hosts[seat.node_id], machine.said_of(seat)
        stage = [other for other in seats if other.stage == seat.stage]
        if seat.socket is None:
            share = config.gpu.memory_utilization or facts.gpu_memory_utilization
            ranks = ranks_of_prompt_gpu(config.cpu, seat, seats, host, by_stage=is_whole)
            device = gpu_device(config, seat, host, share, prompt_bytes * ranks, said)
            return _gpu_in_stage(device, stage, config, is_eager=facts.is_eager)
        device = socket_device(
            config,
            seat,
            seat.socket,
            host,
            cores=len(speeds.threads[seat.rank]),
            measured=speeds.bandwidth.get(seat.rank),
            ranks_on_node=ranks_on_node[seat.node_id],
            said=said,
        )
        device = _socket_in_stage(device, stage, request, host, speeds.row_costs.get(seat.rank))
        threads = len(speeds.threads[seat.rank])
        return replace(device, figures=_with_formats(device.figures, request, host, threads))

    return tuple(map(device_of, seats))


def expert_devices(
    request: PlanRequest, world: World, speeds: RankSpeeds
) -> tuple[RankDevice, ...]:
    """The device of each expert rank with its figures; arguments are those of `rank_devices`.

    Raises:
        UnknownDeviceError: speed or memory of a device is not known.

    """
    config, machine = request.config, request.machine
    hosts = {node.node_id: node.host for node in machine.nodes}
    devices = []
    for seat in world.experts:
        assert seat.socket is not None
        host = hosts[seat.node_id]
        device = socket_device(
            config,
            seat,
            seat.socket,
            host,
            cores=len(speeds.threads[seat.rank]),
            measured=speeds.bandwidth.get(seat.rank),
            ranks_on_node=len(world.experts),
            said=machine.said_of(seat),
        )
        figures = _with_latency(device.figures, EXPERT_LAYER)
        costs = figures.row_costs or speeds.row_costs.get(seat.rank)
        figures = replace(figures, row_costs=costs)
        figures = _with_formats(figures, request, host, len(speeds.threads[seat.rank]))
        devices.append(replace(device, figures=figures))
    return tuple(devices)


def reads_over_link(
    config: HeteroConfig, world: World, nodes: Sequence[Node], *, is_bf16: bool
) -> bool:
    """Whether a GPU computes prompts for CPU ranks or expert ranks, as far as planning can tell.

    A step of many tokens then reads their weights over its link, and takes tens of milliseconds for
    any number of tokens.

    Args:
        config: the user's.
        world: ranks of the engine.
        nodes: the cluster.
        is_bf16: whether what is not quantised is computed in bfloat16.

    """
    hosts = {node.node_id: node.host for node in nodes}
    has_prompts = is_bf16 and any(
        seat.kind == "cpu"
        and world.has_gpu_on(seat.node_id)
        and ranks_of_prompt_gpu(
            config.cpu, seat, world.seats, hosts[seat.node_id], by_stage=False
        )
        for seat in world.seats
    )  # fmt: skip
    return has_prompts or (
        bool(world.experts) and can_read_experts(config, world.experts, nodes, is_bf16=is_bf16)
    )


def can_read_experts(
    config: HeteroConfig, seats: Sequence[Seat], nodes: Sequence[Node], *, is_bf16: bool
) -> bool:
    """Whether GPUs can read the experts of expert ranks, as far as planning can tell.

    Args:
        config: the user's.
        seats: the expert ranks.
        nodes: the cluster.
        is_bf16: whether what is not quantised is computed in bfloat16.

    """
    hosts = [node.host for node in nodes for seat in seats if node.node_id == seat.node_id]
    streams = is_bf16 and all(streams_weights(config.cpu, host) for host in hosts)
    return streams and config.experts.prefill_on_gpu is not False


def _gpu_in_stage(
    device: RankDevice, stage: Sequence[Seat], config: HeteroConfig, *, is_eager: bool
) -> RankDevice:
    # So GPU ranks of mixed groups run, unless gpu.in_mixed_groups says otherwise.
    is_mixed = any(seat.kind == "cpu" for seat in stage)
    is_eager |= is_mixed and config.gpu.in_mixed_groups == "eager"
    figures = _with_latency(device.figures, LATENCIES["gpu", is_eager])
    return replace(device, figures=replace(figures, is_launching=is_eager))


def _socket_in_stage(
    device: RankDevice,
    stage: Sequence[Seat],
    request: PlanRequest,
    host: Host,
    row_costs: RowCosts | None,
) -> RankDevice:
    config, facts = request.config.cpu, request.facts
    streams = facts.is_bf16 and streams_weights(config, host)
    # The ranks of a group add up within their steps where they can share memory.
    can_share = {(seat.kind, seat.node_id) for seat in stage} == {("cpu", stage[0].node_id)}
    is_fused = streams and can_fuse(facts) and config.fuse_layers and can_share
    latency = FUSED if is_fused else LATENCIES["cpu", facts.is_eager]
    figures = _with_latency(device.figures, latency)
    figures = replace(
        figures,
        reached_share=FUSED_READING if is_fused else 1.0,
        adds_within_step=is_fused and len(stage) > 1,
        row_costs=figures.row_costs or row_costs,
    )
    return replace(device, figures=figures)


def _with_formats(
    figures: DeviceFigures, request: PlanRequest, host: Host, cores: int
) -> DeviceFigures:
    """Figures with what the formats of weights in memory cost."""
    config, is_bf16 = request.config.cpu, request.facts.is_bf16
    return replace(
        figures,
        read_share=read_share(config, host, is_bf16=is_bf16),
        expanded=expanded(config, host, cores, is_bf16=is_bf16),
    )


def _with_latency(figures: DeviceFigures, latency: Latency) -> DeviceFigures:
    if figures.layer_latency_s:
        return figures
    return replace(figures, layer_latency_s=latency.layer_s, step_latency_s=latency.step_s)

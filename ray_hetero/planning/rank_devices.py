"""What the devices of all ranks can do, in the stages that they are in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from placement.cluster.assignment import Node, Seat
from placement.cluster.layout import Kind
from placement.host.row_costs import RowCosts
from placement.host.topology import Host
from placement.plan.devices import DeviceFigures, RankDevice
from ray_hetero.config import CpuConfig, HeteroConfig
from ray_hetero.planning.prompt_gpus import ranks_of_prompt_gpu
from ray_hetero.planning.seat_devices import Described, gpu_device, socket_device
from ray_hetero.planning.sockets import read_share, streams_weights
from ray_hetero.world import World


@dataclass(frozen=True)
class Latency:
    """What a step costs beside bytes and operations, in seconds."""

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
FUSED = Latency(0.45e-3, 1.5e-3)
"""Latency of a CPU rank whose layers are one operator, compiled or not; from decode steps of half
an 8B shape on 14 cores beside an H100 (docs/gpu-host/2026-11-22-h100-decode-step.md)."""
EXPERT_LAYER = Latency(0.1e-3, 0.0)
"""Latency of an expert rank: what a call for a layer's experts takes beside its reads, from 128
experts of 2048 x 768, eight of them for one token, on 14 cores (docs/gpu-host/2026-11-23.md)."""

NOTHING_MEASURED: Mapping[int, RowCosts] = MappingProxyType({})


def rank_devices(
    config: HeteroConfig,
    seats: Sequence[Seat],
    nodes: Sequence[Node],
    *,
    threads: Mapping[int, Sequence[int]],
    bandwidth: Mapping[int, float],
    gpu_share: float,
    prompt_gpu_bytes: int = 0,
    prompts_by_stage: bool = False,
    is_eager: bool = False,
    is_bf16: bool = False,
    can_fuse: bool = False,
    described: Described | None = None,
    row_costs: Mapping[int, RowCosts] = NOTHING_MEASURED,
) -> tuple[RankDevice, ...]:
    """The device of each rank with its figures, by rank.

    Args:
        config: figures given here win over measured ones, and these over known parts.
        seats: all ranks.
        nodes: the cluster.
        threads: logical CPUs of each CPU rank's compute threads, by rank.
        bandwidth: measured bytes per second by CPU rank.
        gpu_share: share of a GPU's memory that the engine takes.
        prompt_gpu_bytes: of it, what each CPU rank takes whose prompts a GPU computes.
        prompts_by_stage: whether a GPU computes prompts for all CPU ranks of a stage at once.
        is_eager: whether nothing is compiled or captured.
        is_bf16: whether what is not quantised is computed in bfloat16.
        can_fuse: whether layers of this model can be one operator.
        described: what a description of the cluster says of a seat's device.
        row_costs: what several rows cost, by CPU rank; what a description says wins.

    Raises:
        UnknownDeviceError: speed or memory of a device is not known.

    """
    hosts = {node.node_id: node.host for node in nodes}
    ranks_on_node = {
        node: sum(seat.kind == "cpu" and seat.node_id == node for seat in seats) for node in hosts
    }
    said = {seat.rank: None if described is None else described(seat) for seat in seats}
    devices = (
        gpu_device(
            config,
            seat,
            hosts[seat.node_id],
            gpu_share,
            prompt_gpu_bytes
            * ranks_of_prompt_gpu(
                config.cpu, seat, seats, hosts[seat.node_id], by_stage=prompts_by_stage
            ),
            said[seat.rank],
        )
        if seat.socket is None
        else socket_device(
            config,
            seat,
            seat.socket,
            hosts[seat.node_id],
            cores=len(threads[seat.rank]),
            measured=bandwidth.get(seat.rank),
            ranks_on_node=ranks_on_node[seat.node_id],
            said=said[seat.rank],
        )
        for seat in seats
    )
    stages = {seat.stage: [other for other in seats if other.stage == seat.stage]
              for seat in seats}  # fmt: skip
    return tuple(
        _gpu_in_stage(device, stages[seat.stage], config, is_eager=is_eager)
        if seat.socket is None
        else _socket_in_stage(
            device, stages[seat.stage], config.cpu, hosts[seat.node_id], is_eager=is_eager,
            is_bf16=is_bf16, can_fuse=can_fuse, row_costs=row_costs.get(seat.rank),
        )
        for device, seat in zip(devices, seats, strict=True)
    )  # fmt: skip


def expert_devices(
    config: HeteroConfig,
    seats: Sequence[Seat],
    nodes: Sequence[Node],
    *,
    threads: Mapping[int, Sequence[int]],
    bandwidth: Mapping[int, float],
    is_bf16: bool,
    described: Described | None = None,
    row_costs: Mapping[int, RowCosts] = NOTHING_MEASURED,
) -> tuple[RankDevice, ...]:
    """The device of each expert rank with its figures.

    Args:
        config: as for `rank_devices`.
        seats: the expert ranks.
        nodes: the cluster.
        threads: logical CPUs of each rank's compute threads, by rank.
        bandwidth: measured bytes per second by rank.
        is_bf16: whether what is not quantised is computed in bfloat16.
        described: what a description of the cluster says of a seat's device.
        row_costs: what several rows cost, by rank; what a description says wins.

    Raises:
        UnknownDeviceError: speed or memory of a device is not known.

    """
    hosts = {node.node_id: node.host for node in nodes}
    devices = []
    for seat in seats:
        assert seat.socket is not None
        host = hosts[seat.node_id]
        device = socket_device(
            config,
            seat,
            seat.socket,
            host,
            cores=len(threads[seat.rank]),
            measured=bandwidth.get(seat.rank),
            ranks_on_node=len(seats),
            said=None if described is None else described(seat),
        )
        figures = _with_latency(device.figures, EXPERT_LAYER)
        share = read_share(config.cpu, host, is_bf16=is_bf16)
        costs = figures.row_costs or row_costs.get(seat.rank)
        figures = replace(figures, read_share=share, row_costs=costs)
        devices.append(replace(device, figures=figures))
    return tuple(devices)


def reads_over_link(
    config: HeteroConfig, world: World, nodes: Sequence[Node], *, is_bf16: bool
) -> bool:
    """Whether a GPU computes prompts for CPU ranks or expert ranks, as far as planning can tell.

    A step of many tokens then reads their weights over its link, and takes tens of milliseconds for
    any number of tokens.

    Args:
        config: as for `rank_devices`.
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
        config: as for `rank_devices`.
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
    config: CpuConfig,
    host: Host,
    *,
    is_eager: bool,
    is_bf16: bool,
    can_fuse: bool,
    row_costs: RowCosts | None,
) -> RankDevice:
    streams = is_bf16 and streams_weights(config, host)
    # The ranks of a group add up within their steps where they can share memory.
    can_share = {(seat.kind, seat.node_id) for seat in stage} == {("cpu", stage[0].node_id)}
    is_fused = streams and can_fuse and config.fuse_layers and can_share
    latency = FUSED if is_fused else LATENCIES["cpu", is_eager]
    figures = _with_latency(device.figures, latency)
    figures = replace(
        figures,
        read_share=read_share(config, host, is_bf16=is_bf16),
        adds_within_step=is_fused and len(stage) > 1,
        row_costs=figures.row_costs or row_costs,
    )
    return replace(device, figures=figures)


def _with_latency(figures: DeviceFigures, latency: Latency) -> DeviceFigures:
    if figures.layer_latency_s:
        return figures
    return replace(figures, layer_latency_s=latency.layer_s, step_latency_s=latency.step_s)

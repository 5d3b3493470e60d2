"""What the device of each rank can do: from the configuration, measured, or known parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from placement.cluster.assignment import Node, Seat
from placement.cluster.layout import Kind
from placement.host.row_costs import RowCosts
from placement.host.topology import Host, Socket
from placement.plan.devices import DeviceFigures, RankDevice
from placement.plan.part_names import part_called
from placement.units import GB, GIB
from ray_hetero.config import CpuConfig, HeteroConfig
from ray_hetero.errors import RayHeteroError
from ray_hetero.weight_formats import FORMATS

ASSUMED_HOST_LINK = 25 * GB
"""Bytes per second between a GPU and its host where the part is not in the table: PCIe 4 x16."""
ASSUMED_FLOP_PER_BYTE = 150
"""bf16 FLOP of a GPU for a byte that it reads, where the part is not in the table (150 to 420)."""
SYSTEM_SHARE = 0.05
"""Of a socket's memory, left to the system: Ray's memory monitor kills above 95 %."""
# bf16 FLOP per second and core at 2 GHz: AMX 1024 a cycle; two 512-bit units with bf16 dot
# products 64 (as the table has it for EPYC 9654), without them 32 x 2 in float32; AVX2 half of it.
_FLOPS_PER_CORE = (
    ("amx_bf16", 2048e9), ("avx512_bf16", 154e9), ("avx512f", 128e9), ("avx2", 64e9),
)  # fmt: skip
_SLOWEST_CORE = 32e9
_LEVELS = (
    ("amx_bf16", "amx"), ("avx512_bf16", "avx512_bf16"), ("avx512f", "avx512"), ("avx2", "avx2"),
)  # fmt: skip
"""What the kernels for the best set of instructions of a processor are called."""
_REACHABLE = 0.4
"""Share of these that matrix products reach, as for the table's sockets."""


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
"""Of a CPU rank whose layers are one operator, compiled or not; from decode steps of half an 8B
shape on 14 cores beside an H100 (docs/gpu-host/2026-11-22-h100-decode-step.md)."""
EXPERT_LAYER = Latency(0.1e-3, 0.0)
"""Of an expert rank: what a call for a layer's experts takes beside its reads, from 128 experts of
2048 x 768, eight of them for one token, on 14 cores (docs/gpu-host/2026-11-23.md)."""

NOTHING_MEASURED: Mapping[int, RowCosts] = MappingProxyType({})

Described = Callable[[Seat], RankDevice]
"""What a description of a cluster says of the device of a seat."""


class UnknownDeviceError(RayHeteroError):
    """Speed or memory of a rank's device is not known; says what to set."""


def rank_devices(
    config: HeteroConfig,
    seats: Sequence[Seat],
    nodes: Sequence[Node],
    *,
    threads: Mapping[int, Sequence[int]],
    bandwidth: Mapping[int, float],
    gpu_share: float,
    borrowed_bytes: int = 0,
    borrows_by_stage: bool = False,
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
        borrowed_bytes: of it, what each CPU rank takes that borrows a GPU.
        borrows_by_stage: whether one CPU rank of a stage borrows a GPU for all of them.
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
        _gpu(
            config,
            seat,
            hosts[seat.node_id],
            gpu_share,
            borrowed_bytes
            * borrowers(config.cpu, seat, seats, hosts[seat.node_id], by_stage=borrows_by_stage),
            said[seat.rank],
        )
        if seat.socket is None
        else _socket(
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
        device = _socket(
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
        share = _read_share(config.cpu, host, is_bf16=is_bf16)
        costs = figures.row_costs or row_costs.get(seat.rank)
        figures = replace(figures, read_share=share, row_costs=costs)
        devices.append(replace(device, figures=figures))
    return tuple(devices)


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
    streams = is_bf16 and all(_streams(config.cpu, host) for host in hosts)
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
    streams = is_bf16 and _streams(config, host)
    # The ranks of a group add up within their steps where they can share memory.
    can_share = {(seat.kind, seat.node_id) for seat in stage} == {("cpu", stage[0].node_id)}
    is_fused = streams and can_fuse and config.fuse_layers and can_share
    latency = FUSED if is_fused else LATENCIES["cpu", is_eager]
    figures = _with_latency(device.figures, latency)
    figures = replace(
        figures,
        read_share=_read_share(config, host, is_bf16=is_bf16),
        adds_within_step=is_fused and len(stage) > 1,
        row_costs=figures.row_costs or row_costs,
    )
    return replace(device, figures=figures)


def _read_share(config: CpuConfig, host: Host, *, is_bf16: bool) -> float:
    """Of the bytes of 16-bit matrices, what a CPU rank reads."""
    streams = is_bf16 and _streams(config, host)
    name = config.weight_format(level_of(host)) if streams else "packed"
    return FORMATS[name].read_share


def _with_latency(figures: DeviceFigures, latency: Latency) -> DeviceFigures:
    if figures.layer_latency_s:
        return figures
    return replace(figures, layer_latency_s=latency.layer_s, step_latency_s=latency.step_s)


def level_of(host: Host) -> str | None:
    """The kernels that the host's processor has, as far as planning can tell."""
    return next((name for flag, name in _LEVELS if flag in host.instruction_sets), None)


def _streams(config: CpuConfig, host: Host) -> bool:
    """Whether linear layers stream their weights, as far as planning can tell."""
    return config.streams(level_of(host))


def borrowers(
    config: CpuConfig, seat: Seat, seats: Sequence[Seat], host: Host, *, by_stage: bool
) -> int:
    """Most CPU ranks that borrow one GPU rank's device, as far as planning can tell."""
    if not (config.prefill_on_gpu and _streams(config, host)):
        return 0
    here = [other for other in seats if other.node_id == seat.node_id]
    cpus = {other.stage if by_stage else other.rank for other in here if other.kind == "cpu"}
    return -(-len(cpus) // sum(other.kind == "gpu" for other in here))


def _gpu(
    config: HeteroConfig,
    seat: Seat,
    host: Host,
    share: float,
    borrowed_bytes: int,
    said: RankDevice | None,
) -> RankDevice:
    gpu = next((gpu for gpu in host.gpus if gpu.index == seat.local_rank), None)
    if gpu is None or gpu.memory_bytes is None:
        raise UnknownDeviceError(
            f"GPU {seat.local_rank} of node {seat.node_name} does not tell its memory"
        )
    part, given = _figures_of(said) or part_called(gpu.name), config.gpu.bandwidth_gb_s
    if part is None and given is None:
        raise UnknownDeviceError(
            f"the memory bandwidth of {gpu.name or 'the GPU'} on node {seat.node_name} is not "
            "known: set gpu.bandwidth_gb_s"
        )
    rate = 0.0 if given is None else given * GB
    figures = part or DeviceFigures(
        gpu.name or "GPU", "gpu", rate, rate * ASSUMED_FLOP_PER_BYTE, 0, ASSUMED_HOST_LINK
    )
    if given is not None:
        figures = replace(figures, read_bandwidth=rate, source="configured")
    figures = replace(figures, memory_bytes=gpu.memory_bytes)
    usable = max(0, int(gpu.memory_bytes * share) - borrowed_bytes)
    device = RankDevice(seat.node_name, f"GPU {seat.local_rank}", figures, usable)
    return _as_described(device, said)


def _figures_of(said: RankDevice | None) -> DeviceFigures | None:
    """Speeds that a description gives by numbers; a part's name stands for what is known of it."""
    return said.figures if said is not None and said.figures.source == "configured" else None


def _as_described(device: RankDevice, said: RankDevice | None) -> RankDevice:
    """The device with the limits that a description sets, and what it says a layer costs."""
    if said is None:
        return device
    limits = [one for one in (device.kv_limit_bytes, said.kv_limit_bytes) if one is not None]
    figures = replace(
        device.figures,
        name=said.figures.name,
        layer_latency_s=said.figures.layer_latency_s,
        row_costs=said.figures.row_costs,
    )
    return replace(
        device,
        figures=figures,
        usable_bytes=min(device.usable_bytes, said.usable_bytes),
        runtime_bytes=said.runtime_bytes,
        kv_limit_bytes=min(limits, default=None),
    )


def _socket(
    config: HeteroConfig,
    seat: Seat,
    socket: Socket,
    host: Host,
    *,
    cores: int,
    measured: float | None,
    ranks_on_node: int,
    said: RankDevice | None,
) -> RankDevice:
    figures = _figures_of(said) or _socket_figures(
        config, seat, socket, host, cores=cores, measured=measured
    )
    usable = _free_bytes(seat, socket, host, ranks_on_node)
    asked = config.cpu.kv_cache_gib
    device = RankDevice(
        seat.node_name,
        f"socket {socket.id}",
        figures,
        usable,
        kv_limit_bytes=None if asked == "auto" else int(asked * GIB),
    )
    return _as_described(device, said)


def _socket_figures(
    config: HeteroConfig,
    seat: Seat,
    socket: Socket,
    host: Host,
    *,
    cores: int,
    measured: float | None,
) -> DeviceFigures:
    part, given = part_called(host.cpu_model), config.cpu.bandwidth_gb_s
    package = [node for node in host.numa_nodes if node.package == socket.package]
    whole = max(1, sum(len(node.cores) for node in package))
    known = part if part is not None and not host.instruction_sets else None
    base = DeviceFigures(
        name=part.name if part is not None else host.cpu_model or "CPU",
        kind="cpu",
        read_bandwidth=0,
        compute=known.compute * cores / whole if known is not None else _compute(host, cores),
        memory_bytes=socket.memory_bytes or 0,
    )
    if given is not None:
        return replace(base, read_bandwidth=given * GB, source="configured")
    if measured is not None:
        return replace(base, read_bandwidth=measured, source="measured")
    if part is None:
        raise UnknownDeviceError(
            f"the memory bandwidth of {base.name} on node {seat.node_name} is not known: set "
            "cpu.bandwidth_gb_s"
        )
    return replace(base, read_bandwidth=part.read_bandwidth * len(socket.cores) / whole)


def _compute(host: Host, cores: int) -> float:
    per_core = next(
        (flops for name, flops in _FLOPS_PER_CORE if name in host.instruction_sets), _SLOWEST_CORE
    )
    return max(1, cores) * per_core * _REACHABLE


def _free_bytes(seat: Seat, socket: Socket, host: Host, ranks_on_node: int) -> int:
    """What a CPU rank may take of its socket: what is free there, within the control group."""
    if socket.free_bytes is None or socket.memory_bytes is None:
        raise UnknownDeviceError(
            f"free memory of socket {socket.id} of node {seat.node_name} is not known"
        )
    free = socket.free_bytes - int(SYSTEM_SHARE * socket.memory_bytes)
    if host.memory_limit_bytes is not None:
        free = min(free, int(host.memory_limit_bytes * (1 - SYSTEM_SHARE)) // ranks_on_node)
    return max(0, free)

"""Device of one seat, with figures that are configured, measured, or of a known part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from placement.cluster.assignment import Seat
from placement.host.instruction_sets import best_level
from placement.host.topology import Gpu, Host, Socket
from placement.plan.devices import DeviceFigures, RankDevice
from placement.plan.gpu_figures import Figure, gpu_figures, with_bandwidth
from placement.plan.parts import part_called
from placement.units import GB, GIB
from ray_hetero.config import HeteroConfig
from ray_hetero.errors import RayHeteroError

SYSTEM_SHARE = 0.05
"""Share of a socket's memory left to the system: Ray's memory monitor kills above 95 %."""
_REACHABLE = 0.4
"""Share of a core's operations that matrix products reach, as for the table's sockets."""


Described = Callable[[Seat], RankDevice]
"""Function that gives the device of a seat as a description of a cluster has it."""


class UnknownDeviceError(RayHeteroError):
    """Speed or memory of a rank's device is not known; says what to set."""


def gpu_device(
    config: HeteroConfig,
    seat: Seat,
    host: Host,
    share: float,
    prompt_bytes: int,
    said: RankDevice | None,
) -> RankDevice:
    """The device of a seat on a GPU.

    Args:
        config: figures given here win over measured, computed and published ones.
        seat: of a GPU rank.
        host: its node's.
        share: of the GPU's memory, what the engine takes.
        prompt_bytes: of it, what CPU ranks take whose prompts this GPU computes.
        said: what a description of the cluster says of the device.

    Raises:
        UnknownDeviceError: speed or memory of the GPU is not known.

    """
    gpu = next((gpu for gpu in host.gpus if gpu.index == seat.local_rank), None)
    if gpu is None or gpu.memory_bytes is None:
        raise UnknownDeviceError(
            f"GPU {seat.local_rank} of node {seat.node_name} does not tell its memory, which "
            "nvidia-smi on that node should show"
        )
    figures = _gpu_figures(config, seat, gpu, said)
    figures = replace(figures, memory_bytes=gpu.memory_bytes)
    usable = max(0, int(gpu.memory_bytes * share) - prompt_bytes)
    device = RankDevice(seat.node_name, f"GPU {seat.local_rank}", figures, usable)
    return _as_described(device, said)


def _gpu_figures(
    config: HeteroConfig, seat: Seat, gpu: Gpu, said: RankDevice | None
) -> DeviceFigures:
    """Speeds of a GPU; what the configuration gives wins, then what a description says."""
    rate, link = config.gpu.bandwidth_gb_s, config.gpu.link_gb_s
    figures = gpu_figures(gpu) if said is None else said.figures
    if rate is not None:
        configured = Figure(rate * GB, "configured")
        figures = (
            with_bandwidth(gpu, configured)
            if figures is None
            else replace(figures, read_bandwidth=configured.value, source="configured")
        )
    if figures is None:
        raise UnknownDeviceError(
            f"{gpu.name or 'a GPU'} (GPU {gpu.index} of node {seat.node_name}): its memory "
            "bandwidth is not known: it was not measured, and the driver does not tell it. Set "
            f"gpu.bandwidth_gb_s to 85 % of the datasheet's GB/s"
        )
    if link is not None:
        figures = replace(figures, host_link=link * GB, link_source="configured")
    return figures


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


def socket_device(
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
    """The device of a seat on a socket.

    Args:
        config: figures given here win over measured ones, and these over known parts.
        seat: of a CPU rank.
        socket: where it is.
        host: its node's.
        cores: how many compute.
        measured: bytes per second, if that is known.
        ranks_on_node: CPU ranks that share the node's memory.
        said: what a description of the cluster says of the device.

    Raises:
        UnknownDeviceError: speed or memory of the socket is not known.

    """
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
    known = part.figures if part is not None and not host.instruction_sets else None
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
            f"{base.name} (socket {socket.id} of node {seat.node_name}): its memory bandwidth is "
            "not known, and this installation cannot measure it. Set cpu.bandwidth_gb_s to 75 % "
            "of the datasheet's GB/s"
        )
    published = part.figures.read_bandwidth
    return replace(base, read_bandwidth=published * len(socket.cores) / whole)


def _compute(host: Host, cores: int) -> float:
    return max(1, cores) * best_level(host.instruction_sets).core_flops * _REACHABLE


def _free_bytes(seat: Seat, socket: Socket, host: Host, ranks_on_node: int) -> int:
    """Bytes that a CPU rank may take of its socket: free memory, within the control group."""
    if socket.free_bytes is None or socket.memory_bytes is None:
        raise UnknownDeviceError(
            f"free memory of socket {socket.id} of node {seat.node_name} is not known"
        )
    free = socket.free_bytes - int(SYSTEM_SHARE * socket.memory_bytes)
    if host.memory_limit_bytes is not None:
        free = min(free, int(host.memory_limit_bytes * (1 - SYSTEM_SHARE)) // ranks_on_node)
    return max(0, free)

"""Speeds of this host's devices.  Those of memory and links are kept for plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from placement.errors import NativeError
from placement.host.bandwidth_cache import cached_bandwidth
from placement.host.gpu_rates import with_gpu_rates
from placement.host.row_costs import ROWS
from placement.host.sockets import sockets_of
from placement.host.sysfs import read_host
from placement.host.topology import Host, Socket
from ray_hetero.config import CpuConfig
from ray_hetero.kernels.formats import FORMATS, SCALED_FORMATS
from ray_hetero.planning.socket_rows import RowKernel, kernel_of, timed

FEW_ROWS = 8
"""Rows of the second figure of a format."""


@dataclass(frozen=True)
class Speed:
    """One figure of a device."""

    device: str
    figure: str
    """The figure for people."""
    value: float | None
    """Bytes per second, or the time of several rows in units of that of one; None: not measured."""
    unit: str = "bytes/s"
    why_not: str = ""
    """Why there is no value."""


def speeds_of_this_host() -> Iterator[Speed]:
    """GPUs, sockets, and kernels of CPU ranks by the format of weights, one after the other.

    GPUs are measured anew, unless something computes on them; sockets keep figures of a week, which
    RAY_HETERO_MEASURE_AGAIN renews.  Kernels are measured on the first socket.

    Raises:
        TopologyError: a file of the kernel is malformed.

    """
    host = with_gpu_rates(read_host(), wanted="all")
    yield from _gpus(host)
    sockets = sockets_of(host)
    for socket in sockets:
        yield _socket(host, socket)
    kernel = kernel_of(CpuConfig(), host)
    if sockets and kernel is not None:
        yield from _kernels(sockets[0], kernel)


def _gpus(host: Host) -> Iterator[Speed]:
    for gpu in host.gpus:
        name = f"GPU {gpu.index} ({gpu.name or 'of unknown name'})"
        memory = None if gpu.rates is None else gpu.rates.memory
        link = None if gpu.rates is None else gpu.rates.to_gpu
        why = "something computes on it, or it cannot be measured"
        yield Speed(name, "memory", memory, why_not="" if memory else why)
        yield Speed(name, "link from the host", link, why_not="" if link else why)


def _socket(host: Host, socket: Socket) -> Speed:
    name = f"socket {socket.id} ({host.cpu_model or 'CPU'})"
    try:
        return Speed(name, "memory", cached_bandwidth(socket.cpus, host.cpu_model))
    except NativeError as error:
        return Speed(name, "memory", None, why_not=str(error))


def _kernels(socket: Socket, kernel: RowKernel) -> Iterator[Speed]:
    """Bytes of weights per second in products of one row, and the cost of several rows."""
    name = f"socket {socket.id}, {kernel.level}"
    for weights in (*FORMATS, *SCALED_FORMATS):
        try:
            nbytes, seconds = timed(socket.cpus, replace(kernel, weight_format=weights))
        except NativeError as error:
            yield Speed(name, f"weights as {weights}", None, why_not=str(error))
            continue
        yield Speed(name, f"weights as {weights}", nbytes / seconds[0])
        cost = seconds[ROWS.index(FEW_ROWS)] / seconds[0]
        yield Speed(name, f"{FEW_ROWS} tokens, {weights}", cost, unit="times one token")

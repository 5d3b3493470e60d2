"""Machines to plan on: this host, a cluster that runs, or the description of one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from placement.cluster.assignment import Node, Seat
from placement.cluster.claims import default_directory, held
from placement.errors import NativeError
from placement.host.bandwidth_cache import cached_bandwidth
from placement.host.gpu_rates import with_gpu_rates
from placement.host.gpus import visible_gpus
from placement.host.sockets import sockets_of
from placement.host.sysfs import read_host
from placement.plan.described import DescribedCluster
from placement.plan.devices import Links, RankDevice
from ray_hetero.config import CpuConfig
from ray_hetero.log import logger
from ray_hetero.planning.seat_devices import Described
from ray_hetero.planning.socket_rows import MeasureRows, rows_probe_here
from ray_hetero.planning.sockets import reading_together

Threads = Mapping[int, Sequence[int]]
"""Logical CPUs of the compute threads of each CPU rank, by rank."""
Measure = Callable[[Sequence[Seat], Threads], Mapping[int, float]]
"""Function that measures bytes per second of each CPU rank that can be measured, by rank."""


@dataclass(frozen=True)
class Machine:
    """Nodes, and the sources of the speeds of their devices."""

    nodes: tuple[Node, ...]
    measure: Measure
    """Function that measures what neither the configuration nor the model of a device tells."""
    described: Described | None = None
    """Function that gives the device of a seat as a description of the cluster has it."""
    links: Links | None = None
    """The ways between ranks; None is what is assumed of them."""
    measure_rows: MeasureRows | None = None
    """Function that measures the costs of several rows, where drafts are to be verified."""

    def said_of(self, seat: Seat) -> RankDevice | None:
        """The device of a seat as a description of the cluster has it; None without one."""
        return None if self.described is None else self.described(seat)


def this_host(config: CpuConfig, environment: Mapping[str, str] = os.environ) -> Machine:
    """This host as an engine would find it that starts Ray here.

    Args:
        config: how sockets are cut up.
        environment: CUDA_VISIBLE_DEVICES is looked at.

    Raises:
        TopologyError: a file of the kernel is malformed, or nothing usable is left.

    """
    host = with_gpu_rates(read_host())
    claims = held(default_directory())
    taken = {cpu for holder in claims for cpu in holder.cpus}
    sockets = sockets_of(host, config.unit, config.ranks_per_socket)
    node = Node(
        node_id=host.name,
        address="",
        host=host,
        sockets=tuple(socket for socket in sockets if not taken & set(socket.cpus)),
        gpus=visible_gpus(len(host.gpus), environment.get("CUDA_VISIBLE_DEVICES")),
        cpus=float(len(host.cores)),
        is_driver=True,
        holders=tuple(map(str, claims)),
    )

    def measure(seats: Sequence[Seat], threads: Mapping[int, Sequence[int]]) -> dict[int, float]:
        return dict(_measured(seats, threads, host.cpu_model))

    return Machine((node,), measure, measure_rows=rows_probe_here(host, config))


def _measured(
    seats: Sequence[Seat], threads: Mapping[int, Sequence[int]], cpu_model: str | None
) -> Iterator[tuple[int, float]]:
    for rank, group in reading_together(seats, threads).items():
        try:
            rate = cached_bandwidth(group.cpus, cpu_model)
        except NativeError as error:
            logger.warning("memory bandwidth not measured: %s", error)
            return
        yield rank, rate * len(threads[rank]) / group.threads


def described_machine(cluster: DescribedCluster) -> Machine:
    """A cluster as a file describes it; nothing is measured."""
    return Machine(cluster.as_nodes(), lambda seats, threads: {}, cluster.device_of, cluster.links)

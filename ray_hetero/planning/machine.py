"""Machines to plan on: this host, a cluster that runs, or the description of one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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


def hub_config(model: str) -> Path:
    """Path of a model's folder or config.json; that of a name on the hub is fetched.

    Raises:
        UnknownModelError: it is neither here nor to be had from the hub.

    """
    from placement.model.config import UnknownModelError

    path = Path(model).expanduser()
    is_name = model.count("/") == 1 and not model.startswith((".", "/", "~"))
    # A name that is too long for a file is refused where the file is read.
    if not is_name or _is_there(path):
        return path
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise UnknownModelError(
            f"{model}: there is no such folder, and huggingface_hub, which asks the hub, is missing"
        ) from None
    try:
        return Path(hf_hub_download(model, "config.json"))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UnknownModelError(
            f"{model}: there is no such folder, and its config.json cannot be had from the hub: "
            f"{reason}. Give a folder with a config.json."
        ) from None


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False

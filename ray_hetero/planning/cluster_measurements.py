"""Measurements on the nodes of a Ray cluster: bandwidths of sockets, and times of steps by rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import ray

from placement.cluster import ray_cluster
from placement.cluster.assignment import Node, Seat
from placement.errors import NativeError
from placement.host.bandwidth_cache import cached_bandwidth
from placement.host.row_costs import RowCosts
from ray_hetero.config import CpuConfig
from ray_hetero.log import logger
from ray_hetero.planning.socket_rows import (
    LIMIT_S,
    MeasureRows,
    Place,
    RowsProbe,
    costs_here,
    kernel_of,
    say_missing,
)
from ray_hetero.planning.sockets import Threads, reading_together


def bandwidth_probe(
    nodes: Sequence[Node], timeout_s: float
) -> Callable[[Sequence[Seat], Threads], dict[int, float]]:
    """`measure_bandwidth` on these nodes."""
    models = {node.node_id: node.host.cpu_model for node in nodes}
    return lambda seats, threads: measure_bandwidth(seats, threads, models, timeout_s)


def measure_bandwidth(
    seats: Sequence[Seat], threads: Threads, models: Mapping[str, str | None], timeout_s: float
) -> dict[int, float]:
    """Bytes per second that each CPU rank reads its weights with; ranks without are left out.

    Ranks of one stage on one package read at the same time, so they are measured together and the
    rate is shared out by threads.  One set of CPUs after the other, each for a fraction of a
    second; later starts find the figures kept.

    Args:
        seats: all ranks.
        threads: logical CPUs of each CPU rank's compute threads, by rank.
        models: name of the processor by node.
        timeout_s: longest wait for all nodes together.

    """
    readers = reading_together(seats, threads)
    wanted: dict[str, set[tuple[int, ...]]] = {}
    for group in readers.values():
        wanted.setdefault(group.node_id, set()).add(group.cpus)

    def measure() -> dict[tuple[int, ...], float] | str:
        node = _node_id()
        try:
            return {cpus: cached_bandwidth(cpus, models[node]) for cpus in sorted(wanted[node])}
        except NativeError as error:
            return str(error)

    rates: dict[tuple[str, tuple[int, ...]], float] = {}
    for node, answer in ray_cluster.on_nodes(measure, wanted, timeout_s).items():
        if isinstance(answer, str):
            logger.warning("node %s: memory bandwidth not measured: %s", node, answer)
        else:
            rates |= {(node, cpus): rate for cpus, rate in answer.items()}
    return {
        rank: rates[group.node_id, group.cpus] * len(threads[rank]) / group.threads
        for rank, group in readers.items()
        if (group.node_id, group.cpus) in rates
    }


def _node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


def rows_probe(nodes: Sequence[Node], config: CpuConfig, timeout_s: float) -> MeasureRows:
    """Function that measures ranks on the nodes of the connected Ray cluster.

    Args:
        nodes: the cluster.
        config: what CPU ranks compute with.
        timeout_s: longest wait for all nodes together, beside the measurements' own limits.

    """
    kernels = {node.node_id: kernel_of(config, node.host) for node in nodes}

    def ask(places: Sequence[Place]) -> dict[Place, RowCosts]:
        wanted: dict[str, list[tuple[int, ...]]] = {}
        for node_id, cpus in places:
            wanted.setdefault(node_id, []).append(cpus)

        def measure() -> dict[tuple[int, ...], RowCosts | str]:
            node_id = str(ray.get_runtime_context().get_node_id())
            kernel = kernels[node_id]
            assert kernel is not None
            found: dict[tuple[int, ...], RowCosts | str] = {}
            for cpus in wanted[node_id]:
                try:
                    found[cpus] = costs_here(cpus, kernel)
                except NativeError as error:
                    found[cpus] = str(error)
            return found

        limit_s = timeout_s + LIMIT_S * max(map(len, wanted.values()))
        answers = {}
        for node_id, found in ray_cluster.on_nodes(measure, wanted, limit_s).items():
            for cpus, costs in found.items():
                if isinstance(costs, RowCosts):
                    answers[node_id, cpus] = costs
                else:
                    say_missing(f"node {node_id}", costs)
        return answers

    return RowsProbe(lambda node_id: kernels.get(node_id) is not None, ask)

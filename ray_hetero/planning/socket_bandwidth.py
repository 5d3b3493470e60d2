"""Read bandwidth of every CPU rank's socket, measured on its own node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import ray

from placement.cluster import ray_cluster
from placement.cluster.assignment import Node, Seat
from placement.errors import NativeError
from placement.host.bandwidth_cache import cached_bandwidth
from ray_hetero.log import logger
from ray_hetero.planning.reading_together import Threads, reading_together


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

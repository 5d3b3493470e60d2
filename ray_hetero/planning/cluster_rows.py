"""What steps of several rows cost the sockets of a Ray cluster, each measured on its own node."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from placement.cluster import ray_cluster
from placement.cluster.assignment import Node
from placement.errors import NativeError
from placement.host.row_costs import RowCosts
from ray_hetero.config import CpuConfig
from ray_hetero.planning.socket_rows import (
    LIMIT_S,
    MeasureRows,
    Place,
    RowsProbe,
    costs_here,
    kernel_of,
    say_missing,
)


def rows_probe(nodes: Sequence[Node], config: CpuConfig, timeout_s: float) -> MeasureRows:
    """What measures ranks on the nodes of the Ray cluster that this process is connected to.

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

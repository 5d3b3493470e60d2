"""Devices that an engine that starts now would find, before vLLM builds its configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.util.placement_group import PlacementGroup
from vllm import envs

from placement.cluster import ray_cluster
from placement.cluster.external_group import nodes_within
from ray_hetero.config import HeteroConfig
from ray_hetero.launch.early_layout import OVERRIDE
from ray_hetero.planning.cluster_measurements import bandwidth_probe, rows_probe
from ray_hetero.planning.machine import Machine, this_host
from ray_hetero.runtime.ray_connection import RayConnection


def is_elsewhere() -> bool:
    """Whether Ray tells what there is, and not this host."""
    return ray.is_initialized() or any(map(os.environ.get, ("RAY_ADDRESS", OVERRIDE)))


@contextmanager
def found_machine(config: HeteroConfig, group: PlacementGroup | None) -> Iterator[Machine]:
    """This host, or the cluster that the engine will be on; its devices can be measured inside.

    A cluster that RAY_ADDRESS names is joined for as long as that: an engine is a process of its
    own and joins it itself.  So is a Ray whose resources the environment overrides.

    Args:
        config: how sockets are cut up, and how long to wait for nodes.
        group: the placement group around this process; the machine is what its bundles reserve.

    Raises:
        StartupError: the cluster does not answer.
        TopologyError: none of its nodes describes itself.

    """
    if not is_elsewhere():
        yield this_host(config.cpu)
        return
    connection = RayConnection(None)
    try:
        yield _cluster(config, group)
    finally:
        connection.close()


def _cluster(config: HeteroConfig, group: PlacementGroup | None) -> Machine:
    timeout_s = config.placement.timeout_s
    nodes = ray_cluster.discover(
        unit=config.cpu.unit, shares=config.cpu.ranks_per_socket, timeout_s=timeout_s
    )
    if group is not None:
        bundles = envs.VLLM_RAY_BUNDLE_INDICES
        external = ray_cluster.external_group(group, nodes, timeout_s, bundles)
        nodes = nodes_within(nodes, external.offers)
    rows = rows_probe(nodes, config.cpu, timeout_s)
    return Machine(nodes, bandwidth_probe(nodes, timeout_s), measure_rows=rows)

"""The one module of this package that talks to Ray: describe the nodes, reserve the bundles."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from placement.assignment import Node, Seat, bundle_of
from placement.errors import ReservationError, TopologyError
from placement.sockets import sockets_of
from placement.sysfs import read_host
from placement.topology import Host, SocketUnit

logger = logging.getLogger(__name__)


def discover(*, unit: SocketUnit, shares: int, timeout_s: float) -> tuple[Node, ...]:
    """Describe every node of the connected Ray cluster, each by one short task on it.

    Nodes that do not answer in time are named in the log and left out.

    Args:
        unit: what one CPU rank gets.
        shares: into how many ranks each socket is split.
        timeout_s: longest wait for all nodes together.

    Raises:
        TopologyError: no node answered.

    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    driver = ray.get_runtime_context().get_node_id()
    hosts: dict[str, Host] = {driver: read_host()}
    hosts |= _ask([node for node in alive if node["NodeID"] != driver], timeout_s)
    nodes = tuple(
        Node(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            host=hosts[node["NodeID"]],
            sockets=sockets_of(hosts[node["NodeID"]], unit, shares),
            gpus=int(node["Resources"].get("GPU", 0)),
            cpus=float(node["Resources"].get("CPU", 0)),
            is_driver=node["NodeID"] == driver,
        )
        for node in alive
        if node["NodeID"] in hosts
    )
    if not nodes:
        raise TopologyError(f"none of {len(alive)} Ray nodes described itself in {timeout_s:g} s")
    return nodes


def _ask(nodes: Sequence[dict[str, Any]], timeout_s: float) -> dict[str, Host]:
    describe = ray.remote(num_cpus=0)(read_host)
    tasks = {
        describe.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(): node
        for node in nodes
    }
    hosts: dict[str, Host] = {}
    if not tasks:
        return hosts
    done, late = ray.wait(list(tasks), num_returns=len(tasks), timeout=timeout_s)
    for task in late:
        ray.cancel(task, force=True)
        logger.warning("node %s left out: no answer in %g s", _name(tasks[task]), timeout_s)
    for task in done:
        try:
            hosts[tasks[task]["NodeID"]] = ray.get(task)
        except RayError as error:
            logger.warning("node %s left out: %s", _name(tasks[task]), error)
    return hosts


def _name(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def reserve(
    seats: Sequence[Seat], *, accelerator_type: str | None, timeout_s: float, name: str
) -> PlacementGroup:
    """Reserve one bundle a rank, bundle i for rank i, each on its seat's node.

    Raises:
        ReservationError: Ray did not give the bundles in time; nothing stays reserved.

    """
    bundles = [bundle_of(seat, accelerator_type) for seat in seats]
    group = placement_group(bundles, strategy="PACK", name=name)
    try:
        ray.get(group.ready(), timeout=timeout_s)
    except GetTimeoutError:
        release(group)
        raise ReservationError(_missing(bundles, timeout_s)) from None
    landed = placement_group_table(group)["bundles_to_node_id"]
    assert [landed[seat.rank] for seat in seats] == [seat.node_id for seat in seats]
    return group


def release(group: PlacementGroup) -> None:
    """Give all bundles back; nothing to do where Ray is gone already."""
    if ray.is_initialized():
        remove_placement_group(group)


def _missing(bundles: Sequence[dict[str, float]], timeout_s: float) -> str:
    asked: dict[str, float] = {}
    for bundle in bundles:
        for resource, amount in bundle.items():
            asked[resource] = asked.get(resource, 0) + amount
    free = ray.available_resources()
    total = ray.cluster_resources()
    lines = [
        f"{resource}: asked {amount:g}, free {free.get(resource, 0):g} of {total.get(resource, 0):g}"
        for resource, amount in sorted(asked.items())
        if free.get(resource, 0) < amount
    ]
    short = "; ".join(lines) or "every resource is there, but not on the nodes planned"
    return (
        f"Ray gave no placement group in {timeout_s:g} s: {short}. Another job may hold it "
        "(`ray status`), or the node was started with fewer (`ray-hetero ray-args` prints what "
        "to add to `ray start`)."
    )


def is_connected() -> bool:
    """Whether this process is connected to a Ray cluster."""
    return bool(ray.is_initialized())


def known_address() -> str | None:
    """Address of a running cluster that the environment names, if any."""
    return os.environ.get("RAY_ADDRESS") or None

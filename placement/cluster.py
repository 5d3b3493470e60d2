"""The one module of this package that talks to Ray: describe the nodes, reserve the bundles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from placement.assignment import Node, Seat, bundle_of
from placement.claims import Holder, default_directory, held
from placement.errors import ReservationError, TopologyError
from placement.sockets import sockets_of
from placement.sysfs import read_host
from placement.topology import Host, SocketUnit

logger = logging.getLogger(__name__)

T = TypeVar("T")


def _describe() -> tuple[Host, tuple[Holder, ...]]:
    return read_host(), held(default_directory())


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
    answers = on_nodes(_describe, [node["NodeID"] for node in alive], timeout_s)
    if not answers:
        raise TopologyError(f"none of {len(alive)} Ray nodes described itself in {timeout_s:g} s")
    driver = ray.get_runtime_context().get_node_id()
    nodes = []
    for node in alive:
        if node["NodeID"] not in answers:
            logger.warning("node %s left out: it did not describe itself", _name(node))
            continue
        host, claims = answers[node["NodeID"]]
        taken = {cpu for claim in claims for cpu in claim.cpus}
        sockets = sockets_of(host, unit, shares)
        nodes.append(
            Node(
                node_id=node["NodeID"],
                address=node["NodeManagerAddress"],
                host=host,
                sockets=tuple(socket for socket in sockets if not taken & set(socket.cpus)),
                gpus=int(node["Resources"].get("GPU", 0)),
                cpus=float(node["Resources"].get("CPU", 0)),
                is_driver=node["NodeID"] == driver,
                holders=tuple(map(str, claims)),
            )
        )
    return tuple(nodes)


def on_nodes(function: Callable[[], T], node_ids: Iterable[str], timeout_s: float) -> dict[str, T]:
    """Call a function on nodes, on each by one short task, here directly.

    Args:
        function: importable on every node.
        node_ids: Ray's ids.
        timeout_s: longest wait for all nodes together.

    Returns:
        Answers by node; nodes that are late or fail are named in the log and left out.

    """
    here = ray.get_runtime_context().get_node_id()
    task = ray.remote(num_cpus=0)(function)
    tasks = {
        task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote(): node_id
        for node_id in node_ids
        if node_id != here
    }
    answers = {here: function()} if here in node_ids else {}
    done, late = (
        ray.wait(list(tasks), num_returns=len(tasks), timeout=timeout_s) if tasks else ([], [])
    )
    for ref in late:
        ray.cancel(ref, force=True)
        logger.warning("node %s: no answer in %g s", tasks[ref], timeout_s)
    for ref in done:
        try:
            answers[tasks[ref]] = ray.get(ref)
        except RayError as error:
            logger.warning("node %s: %s", tasks[ref], error)
    return answers


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
        f"{resource}: asked {amount:g}, "
        f"free {free.get(resource, 0):g} of {total.get(resource, 0):g}"
        for resource, amount in sorted(asked.items())
        if free.get(resource, 0) < amount
    ]
    short = "; ".join(lines) or "every resource is there, but not on the nodes planned"
    return (
        f"Ray gave no placement group in {timeout_s:g} s: {short}. Another job may hold it "
        "(`ray status`), or the node was started with fewer (`ray-hetero ray-args` prints what "
        "to add to `ray start`)."
    )

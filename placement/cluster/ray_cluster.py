"""The one module of this package that talks to Ray: describe the nodes, reserve the bundles."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from placement.cluster.assignment import Node, Seat, bundle_of
from placement.cluster.claims import Holder, default_directory, held
from placement.cluster.external_group import Bundle, Offer, bundles_of, chosen_bundles, offers_of
from placement.cluster.lockfiles import DIRECTORY_VARIABLE
from placement.cluster.shortage import NodeResources, impossible, missing
from placement.errors import ReservationError, TopologyError
from placement.host.gpu_rates import with_gpu_rates
from placement.host.sockets import sockets_of
from placement.host.sysfs import machine_id, read_host
from placement.host.topology import Host, Socket, SocketUnit

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class _Description:
    """Answer of a node about itself."""

    host: Host
    claims: tuple[Holder, ...]
    machine: str
    """Identity of the machine, equal on all Ray nodes that share it; empty if unknown."""


def _describe(claims: Path | None) -> _Description:
    host = with_gpu_rates(read_host())
    return _Description(host, held(claims or default_directory()), machine_id())


def discover(
    *, unit: SocketUnit, shares: int, timeout_s: float, is_own: bool = False
) -> tuple[Node, ...]:
    """Describe every node of the connected Ray cluster, each by one short task on it.

    Nodes that do not answer in time are named in the log and left out.  Nodes that Ray gives no
    CPUs (a head node that is to stay free) offer no sockets.

    Args:
        unit: what one CPU rank gets.
        shares: into how many ranks each socket is split.
        timeout_s: longest wait for all nodes together.
        is_own: this process has started Ray itself, so that its node is described right here.  A
            Ray node that was there before may have other cores than this process.

    Raises:
        TopologyError: no node answered.

    """
    alive = _alive()
    driver = ray.get_runtime_context().get_node_id()
    named = os.environ.get(DIRECTORY_VARIABLE)
    describe = functools.partial(_describe, Path(named) if named else None)
    answers = on_nodes(describe, alive, timeout_s, is_here_direct=is_own)
    if not answers:
        raise TopologyError(f"none of {len(alive)} Ray nodes described itself in {timeout_s:g} s")
    for node_id in alive.keys() - answers.keys():
        logger.warning("node %s left out: it did not describe itself", _name(alive[node_id]))
    taken = _claimed(answers)
    resources = _resources(alive)
    nodes = []
    for node_id in sorted(
        answers, key=lambda one: (one != driver, alive[one]["NodeManagerAddress"])
    ):
        answer = answers[node_id]
        machine = taken[answer.machine or node_id]
        sockets = sockets_of(answer.host, unit, shares) if resources[node_id].total("CPU") else ()
        free = tuple(socket for socket in sockets if not machine & set(socket.cpus))
        machine.update(cpu for socket in free for cpu in socket.cpus)
        nodes.append(_node(alive[node_id], answer, free, resources[node_id], driver))
    return tuple(nodes)


def _node(
    ray_node: dict[str, Any],
    answer: _Description,
    sockets: tuple[Socket, ...],
    resources: NodeResources,
    driver: str,
) -> Node:
    return Node(
        node_id=ray_node["NodeID"],
        address=ray_node["NodeManagerAddress"],
        host=answer.host,
        sockets=sockets,
        gpus=int(resources.free("GPU")),
        held_gpus=int(resources.held_of("GPU")),
        cpus=resources.total("CPU"),
        is_driver=ray_node["NodeID"] == driver,
        holders=tuple(map(str, answer.claims)),
    )


def _claimed(answers: Mapping[str, _Description]) -> dict[str, set[int]]:
    """Logical CPUs that engines hold, by machine.

    Several Ray nodes on one machine see the same sockets, so what one of them offers, or sees
    claimed, the others do not have.
    """
    taken: dict[str, set[int]] = {}
    for node_id, answer in answers.items():
        cpus = {cpu for claim in answer.claims for cpu in claim.cpus}
        taken.setdefault(answer.machine or node_id, set()).update(cpus)
    return taken


def on_nodes(
    function: Callable[[], T],
    node_ids: Iterable[str],
    timeout_s: float,
    *,
    is_here_direct: bool = True,
) -> dict[str, T]:
    """Call a function on nodes, on each by one short task.

    Args:
        function: importable on every node.
        node_ids: Ray's ids.
        timeout_s: longest wait for all nodes together.
        is_here_direct: on this process's node, call it in this process.

    Returns:
        Answers by node; nodes that are late or fail are named in the log and left out.

    """
    here = ray.get_runtime_context().get_node_id() if is_here_direct else None
    task = ray.remote(num_cpus=0)(_called)
    tasks = {
        task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote(function): node_id
        for node_id in node_ids
        if node_id != here
    }
    answers = {here: function()} if here is not None and here in node_ids else {}
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


def _called(function: Callable[[], T]) -> T:
    return function()


def _alive() -> dict[str, dict[str, Any]]:
    """Ray's entries of its nodes, by id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def gone(node_ids: Iterable[str]) -> frozenset[str]:
    """Dead nodes, according to Ray, among these; they do not come back under their ids."""
    return frozenset(node_ids) - _alive().keys()


def _name(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


# --- reservations ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Reservation:
    """The placement group of an engine's ranks."""

    group: PlacementGroup
    bundles: tuple[int, ...]
    """Number of each rank's bundle, by rank."""
    is_own: bool = True
    """Whether the group was made for this engine, and goes with it."""


def reserve(
    seats: Sequence[Seat],
    *,
    accelerator_type: str | None,
    timeout_s: float,
    name: str,
    memory_bytes: Mapping[int, int] | None = None,
) -> Reservation:
    """Reserve one bundle a rank, bundle i for rank i, each on its seat's node.

    Args:
        seats: all ranks.
        accelerator_type: Ray's accelerator type that a GPU must be of, for example H100.
        timeout_s: longest wait.
        name: of the placement group.
        memory_bytes: host memory that CPU ranks will take, by rank; `reservable_memory` tells
            what Ray can give.

    Raises:
        ReservationError: Ray cannot give the bundles, or not in time; nothing stays reserved.

    """
    memory = memory_bytes or {}
    bundles = [bundle_of(seat, accelerator_type, memory.get(seat.rank)) for seat in seats]
    asked = [(seat.node_id, bundle) for seat, bundle in zip(seats, bundles, strict=True)]
    if problem := impossible(asked, _resources(_alive())):
        raise ReservationError(problem)
    group = placement_group(bundles, strategy="PACK", name=name)
    if not group.wait(timeout_s):
        problem = missing(asked, _resources(_alive(), but=group), timeout_s)
        release(group)
        raise ReservationError(problem)
    landed = placement_group_table(group)["bundles_to_node_id"]
    assert [landed[seat.rank] for seat in seats] == [seat.node_id for seat in seats]
    return Reservation(group, tuple(range(len(seats))))


def release(group: PlacementGroup) -> None:
    """Give all bundles back; nothing to do where Ray is gone already."""
    if ray.is_initialized():
        remove_placement_group(group)


def reservable_memory(
    needed: Mapping[int, int], seats: Sequence[Seat], engines: int = 1
) -> dict[int, int]:
    """Host memory for CPU ranks that Ray has free: all that a node's ranks need, or none.

    Ray counts 70 % of a node's memory unless told otherwise (`ray start --memory`), and weights may
    rightly take more; a bundle that asked for it would then wait for ever.

    Args:
        needed: bytes by CPU rank.
        seats: all ranks.
        engines: engines of this size that start together and want as much each.

    Returns:
        Bytes to reserve, by rank; a line in the log names nodes that have too little.

    """
    resources = _resources(_alive())
    by_node: dict[str, dict[int, int]] = {}
    for seat in seats:
        if seat.rank in needed:
            by_node.setdefault(seat.node_id, {})[seat.rank] = needed[seat.rank]
    reserved: dict[int, int] = {}
    for node_id, ranks in by_node.items():
        free, asked = resources[node_id].free("memory"), sum(ranks.values())
        if asked * engines <= free:
            reserved |= ranks
        else:
            logger.warning(
                "node %s: %.1f GiB of memory for its ranks are not reserved in Ray, which has only "
                "%.1f GiB left there, so other jobs may count on the same memory. Start Ray there "
                "with a larger `ray start --memory=BYTES` (`ray-hetero ray-args` prints one).",
                resources[node_id].name, asked / 2**30, free / 2**30,
            )  # fmt: skip
    return reserved


def current_group() -> PlacementGroup | None:
    """The placement group that this task or actor was started in, if it was."""
    return ray.util.get_current_placement_group() if ray.is_initialized() else None


@dataclass(frozen=True)
class ExternalGroup:
    """A placement group that somebody else made, as an engine inside it may use it."""

    group: PlacementGroup
    bundles: tuple[Bundle, ...]
    offers: tuple[Offer, ...]

    def reservation(self, seats: Sequence[Seat]) -> Reservation:
        """The bundles of seats on `nodes_within` these offers."""
        return Reservation(self.group, bundles_of(seats, self.offers), is_own=False)


def external_group(
    group: PlacementGroup, nodes: Sequence[Node], timeout_s: float, numbers: str = ""
) -> ExternalGroup:
    """Look at a group that somebody else made.

    Args:
        group: it.
        nodes: the cluster.
        timeout_s: longest wait for the group.
        numbers: VLLM_RAY_BUNDLE_INDICES, which bundles may be used; empty is all.

    Raises:
        ReservationError: the group is not there in time.
        LayoutError: a bundle cannot be a rank's, or there is none of that number.

    """
    bundles = chosen_bundles(_bundles(group, timeout_s), numbers)
    return ExternalGroup(group, bundles, offers_of(nodes, bundles))


def _bundles(group: PlacementGroup, timeout_s: float) -> tuple[Bundle, ...]:
    if not group.wait(timeout_s):
        raise ReservationError(
            f"the placement group {group.id.hex()} that this engine is to use got no resources in "
            f"{timeout_s:g} s (placement.timeout_s); `ray status` shows what it waits for"
        )
    table = placement_group_table(group)
    return tuple(
        Bundle(index, table["bundles_to_node_id"][index], has.get("CPU", 0), has.get("GPU", 0))
        for index, has in sorted(table["bundles"].items())
    )


def _resources(
    nodes: Mapping[str, dict[str, Any]], but: PlacementGroup | None = None
) -> dict[str, NodeResources]:
    """Ray's resources of these nodes, with those that placement groups, except one, hold."""
    ignored = None if but is None else but.id.hex()
    found = {
        node_id: NodeResources(_name(node), dict(node["Resources"]))
        for node_id, node in nodes.items()
    }
    for group_id, group in placement_group_table().items():
        if group["state"] == "REMOVED" or group_id == ignored:
            continue
        for index, node_id in group["bundles_to_node_id"].items():
            if node_id in found:
                found[node_id].hold(group["name"] or group_id, group["bundles"][index])
    return found

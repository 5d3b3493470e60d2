"""Node and socket of each rank, and the Ray bundle that stands for its device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from placement.cluster.layout import Kind, Layout
from placement.errors import LayoutError
from placement.host.topology import Host, Socket
from placement.words import plural

NODE_SLIVER = 0.001
"""Share of a node's own `node:<address>` resource that ties a bundle to it."""


@dataclass(frozen=True)
class Node:
    """One node of the Ray cluster, as one engine may use it."""

    node_id: str
    address: str
    """Address in the cluster; empty of a node that is only described."""
    host: Host
    sockets: tuple[Socket, ...]
    """Sockets (or shares of them) that no other engine holds."""
    gpus: int
    """GPUs of the node that no placement group holds."""
    cpus: float
    """CPUs that Ray knows on the node."""
    is_driver: bool = False
    holders: tuple[str, ...] = ()
    """Holders of the node's other sockets, for messages."""
    held_gpus: int = 0
    """GPUs of the node that placement groups hold."""

    @property
    def label(self) -> str:
        """Name of the node for messages, with its address if it has one."""
        return f"{self.host.name} ({self.address})" if self.address else self.host.name


@dataclass(frozen=True)
class Turn:
    """An engine's place among those that start together on the same cluster (data parallelism)."""

    index: int = 0
    engines: int = 1


ALONE = Turn()


@dataclass(frozen=True)
class Seat:
    """One rank of the world and where it sits."""

    rank: int
    stage: int
    tensor_rank: int
    kind: Kind
    node_id: str
    address: str
    node_name: str
    local_rank: int
    """Position among the ranks of its kind on its node."""
    is_driver_node: bool
    socket: Socket | None = None
    """The socket of a CPU rank."""
    bundle_cpus: float = 0
    serves_experts: bool = False
    """Whether it holds experts of all stages, and is no rank of vLLM's."""

    @property
    def device(self) -> str:
        """Name of the rank's device, for people."""
        if self.socket is None:
            return f"gpu {self.local_rank}"
        nodes = ",".join(map(str, self.socket.numa_nodes))
        return f"socket {self.socket.id} (NUMA {nodes}, {plural(len(self.socket.cores), 'core')})"


@dataclass
class _Free:
    """Cores, GPUs and sockets of one node that no rank has yet."""

    node: Node
    gpus: int
    sockets: list[Socket]
    seated: int = 0
    """CPU ranks that have no socket yet."""

    def room(self, gpus: int, cpus: int) -> bool:
        return gpus <= self.gpus and cpus <= len(self.sockets) - self.seated

    def socket_near(self, numa_nodes: Collection[int]) -> Socket | None:
        """Take the first socket that is left on one of these NUMA nodes."""
        for socket in self.sockets:
            if not set(numa_nodes).isdisjoint(socket.numa_nodes):
                self.sockets.remove(socket)
                return socket
        return None


def assign(
    layout: Layout,
    nodes: Sequence[Node],
    turn: Turn = ALONE,
    expert_ranks: int = 0,
    *,
    near_gpus: bool = True,
) -> tuple[Seat, ...]:
    """Seat every rank, the ranks of a stage on one node wherever one has the room.

    The driver's node comes first, then nodes by address, so the same input gives the same seats.

    Args:
        layout: kinds of all ranks.
        nodes: the cluster.
        turn: this engine's; the devices of those before it are left to them where there are enough
            for all, so that engines that do not see each other's claims yet choose others.
        expert_ranks: sockets for experts; they come last, and all ranks are on one node then.
        near_gpus: whether a CPU rank sits near the GPUs that it exchanges with, as far as the host
            tells where they are; else sockets are taken in their order.

    Raises:
        LayoutError: the nodes together have too few devices of a kind.

    """
    places = _places(nodes)
    try:
        for _ in range(turn.index):
            _seat_all(layout, places, nodes, expert_ranks, near_gpus)
        return _seat_all(layout, places, nodes, expert_ranks, near_gpus)
    except LayoutError:
        if not turn.index:
            raise
    # The others have theirs already, and this is what they left.
    return _seat_all(layout, _places(nodes), nodes, expert_ranks, near_gpus)


def has_room(layout: Layout, nodes: Sequence[Node], engines: int, expert_ranks: int = 0) -> bool:
    """Whether so many engines of one layout can be seated together.

    Args:
        layout: kinds of all ranks of each.
        nodes: the cluster.
        engines: how many.
        expert_ranks: sockets for experts, of each.

    """
    places = _places(nodes)
    try:
        for _ in range(engines):
            _seat_all(layout, places, nodes, expert_ranks, True)
    except LayoutError:
        return False
    return True


def share_of(nodes: Sequence[Node], engines: int) -> tuple[Node, ...]:
    """The nodes that each of several engines may plan with: some of them, or a part of each."""
    if engines <= len(nodes):
        ordered = sorted(nodes, key=lambda node: (not node.is_driver, node.address))
        return tuple(ordered[: len(nodes) // engines])
    return tuple(
        replace(
            node, gpus=node.gpus // engines, sockets=node.sockets[: len(node.sockets) // engines]
        )
        for node in nodes
    )


def _places(nodes: Sequence[Node]) -> list[_Free]:
    return [
        _Free(node, node.gpus, list(node.sockets))
        for node in sorted(nodes, key=lambda node: (not node.is_driver, node.address))
    ]


def _seat_all(
    layout: Layout,
    places: Sequence[_Free],
    nodes: Sequence[Node],
    expert_ranks: int,
    near_gpus: bool,
) -> tuple[Seat, ...]:
    """Seats of one engine; takes its devices out of the places."""
    if expert_ranks:
        places = [_place_of_all(layout, places, nodes, expert_ranks)]
    seats: list[Seat] = []
    used: Counter[tuple[str, Kind]] = Counter()
    gpus_before = {place.node.node_id: place.node.gpus - place.gpus for place in places}
    for stage, kinds in enumerate(layout.stages):
        gpus, cpus = kinds.count("gpu"), kinds.count("cpu")
        home = next((place for place in places if place.room(gpus, cpus)), None)
        for tensor_rank, kind in enumerate(kinds):
            one = (kind == "gpu", kind == "cpu")
            place = home or next((p for p in places if p.room(*one)), None)
            if place is None:
                raise LayoutError(_no_room(layout, stage, kind, nodes))
            local_rank = used[place.node.node_id, kind]
            used[place.node.node_id, kind] += 1
            seats.append(_seat(place, len(seats), stage, tensor_rank, kind, local_rank))
    for number in range(expert_ranks):
        local_rank = used[places[0].node.node_id, "cpu"] + number
        seat = _seat(places[0], len(seats), len(layout.stages), number, "cpu", local_rank)
        seats.append(replace(seat, serves_experts=True))
    for place in places:
        _give_sockets(place, seats, gpus_before[place.node.node_id] if near_gpus else None)
    return tuple(seats)


def _place_of_all(
    layout: Layout, places: Sequence[_Free], nodes: Sequence[Node], expert_ranks: int
) -> _Free:
    """A node for all stages and expert ranks, which share memory.

    Raises:
        LayoutError: no node has room for all of them.

    """
    gpus, sockets = layout.count("gpu"), layout.count("cpu") + expert_ranks
    found = next((place for place in places if place.room(gpus, sockets)), None)
    if found is None:
        raise LayoutError(
            f"layout {layout} with {plural(expert_ranks, 'expert rank')} (experts.ranks) "
            f"needs {plural(gpus, 'GPU')} "
            f"and {sockets} CPU sockets of one node. There are: {_there(nodes)}. "
            "cpu.ranks_per_socket splits a socket into several."
        )
    return found


def gpus_near(
    seat: Seat, seats: Sequence[Seat], host: Host, gpus_before: int = 0
) -> dict[int, int]:
    """NUMA nodes of the GPUs that a CPU rank exchanges with on its node, by the GPU's number.

    These are the GPU ranks of its own stage and of the stages beside it; for an expert rank, all.

    Args:
        seat: the CPU rank's.
        seats: all ranks.
        host: of its node.
        gpus_before: GPUs of the node that engines before this one have.

    """
    numa_nodes = {gpu.index: gpu.numa_node for gpu in host.gpus if gpu.numa_node is not None}
    others = [
        gpus_before + other.local_rank
        for other in seats
        if other.kind == "gpu"
        and other.node_id == seat.node_id
        and (seat.serves_experts or abs(other.stage - seat.stage) <= 1)
    ]
    return {gpu: numa_nodes[gpu] for gpu in others if gpu in numa_nodes}


def _give_sockets(place: _Free, seats: list[Seat], gpus_before: int | None) -> None:
    """Give the CPU ranks of a node their sockets: first to those that have one near their GPUs,
    unless `gpus_before` is None.
    """
    node = place.node
    mine = [seat for seat in seats if seat.kind == "cpu" and seat.node_id == node.node_id]
    near = {
        seat.rank: place.socket_near(gpus_near(seat, seats, node.host, gpus_before).values())
        for seat in mine
        if gpus_before is not None
    }
    for seat in mine:
        socket = near.get(seat.rank) or place.sockets.pop(0)
        # Shares that overlap (more ranks than cores) must still fit into the node's CPUs.
        cpus = min(float(len(socket.cores)), len(node.host.cores) / max(1, len(node.sockets)))
        seats[seat.rank] = replace(seat, socket=socket, bundle_cpus=cpus)
    place.seated = 0


def _seat(
    place: _Free, rank: int, stage: int, tensor_rank: int, kind: Kind, local_rank: int
) -> Seat:
    """A seat; a CPU rank's has no socket yet."""
    node = place.node
    if kind == "gpu":
        place.gpus -= 1
    else:
        place.seated += 1
    return Seat(
        rank=rank,
        stage=stage,
        tensor_rank=tensor_rank,
        kind=kind,
        node_id=node.node_id,
        address=node.address,
        node_name=node.host.name,
        local_rank=local_rank,
        is_driver_node=node.is_driver,
    )


def _no_room(layout: Layout, stage: int, kind: Kind, nodes: Sequence[Node]) -> str:
    return (
        f"layout {layout} needs {plural(layout.count('gpu'), 'GPU')} and "
        f"{plural(layout.count('cpu'), 'socket')}; "
        f"no {kind} is left for stage {stage}. There are: {_there(nodes)}."
    )


def _there(nodes: Sequence[Node]) -> str:
    return "; ".join(
        f"{node.label}: {plural(node.gpus, 'GPU')}, {plural(len(node.sockets), 'socket')}"
        for node in nodes
    )


def bundle_of(
    seat: Seat, accelerator_type: str | None = None, memory_bytes: int | None = None
) -> dict[str, float]:
    """The Ray bundle that reserves a seat's device on its node.

    Args:
        seat: a rank's seat.
        accelerator_type: Ray's accelerator type that a GPU must be of, for example H100.
        memory_bytes: host memory that a CPU rank will take; None reserves none.

    """
    bundle: dict[str, float] = {f"node:{seat.address}": NODE_SLIVER}
    if seat.kind == "cpu":
        bundle["CPU"] = seat.bundle_cpus
        return bundle if memory_bytes is None else bundle | {"memory": memory_bytes}
    bundle["GPU"] = 1
    if accelerator_type is not None:
        bundle[f"accelerator_type:{accelerator_type}"] = NODE_SLIVER
    return bundle

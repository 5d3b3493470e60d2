"""Which rank sits on which node and socket, and the Ray bundle that stands for its device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from placement.cluster.layout import Kind, Layout
from placement.errors import LayoutError
from placement.host.topology import Host, Socket

NODE_SLIVER = 0.001
"""Share of a node's own `node:<address>` resource that ties a bundle to it."""


@dataclass(frozen=True)
class Node:
    """One node of the Ray cluster, as one engine may use it."""

    node_id: str
    address: str
    host: Host
    sockets: tuple[Socket, ...]
    """Sockets (or shares of them) that no other engine holds."""
    gpus: int
    """GPUs of it that no placement group holds."""
    cpus: float
    """CPUs that Ray knows there."""
    is_driver: bool = False
    holders: tuple[str, ...] = ()
    """Who holds the other sockets, for messages."""
    held_gpus: int = 0
    """GPUs of it that placement groups hold."""


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
        """What the rank computes on, for people."""
        if self.socket is None:
            return f"gpu {self.local_rank}"
        nodes = ",".join(map(str, self.socket.numa_nodes))
        return f"socket {self.socket.id} (NUMA {nodes}, {len(self.socket.cores)} cores)"


@dataclass
class _Free:
    """What is left of one node."""

    node: Node
    gpus: int
    sockets: list[Socket]

    def room(self, gpus: int, cpus: int) -> bool:
        return gpus <= self.gpus and cpus <= len(self.sockets)


def assign(
    layout: Layout, nodes: Sequence[Node], turn: Turn = ALONE, expert_ranks: int = 0
) -> tuple[Seat, ...]:
    """Seat every rank, the ranks of a stage on one node wherever one has the room.

    The driver's node comes first, then nodes by address, so the same input gives the same seats.

    Args:
        layout: kinds of all ranks.
        nodes: the cluster.
        turn: this engine's; the devices of those before it are left to them where there are enough
            for all, so that engines that do not see each other's claims yet choose others.
        expert_ranks: sockets for experts; they come last, and all ranks are on one node then.

    Raises:
        LayoutError: the nodes together have too few devices of a kind.

    """
    places = _places(nodes)
    try:
        for _ in range(turn.index):
            _seat_all(layout, places, nodes, expert_ranks)
        return _seat_all(layout, places, nodes, expert_ranks)
    except LayoutError:
        if not turn.index:
            raise
    # The others have theirs already, and this is what they left.
    return _seat_all(layout, _places(nodes), nodes, expert_ranks)


def _places(nodes: Sequence[Node]) -> list[_Free]:
    return [
        _Free(node, node.gpus, list(node.sockets))
        for node in sorted(nodes, key=lambda node: (not node.is_driver, node.address))
    ]


def _seat_all(
    layout: Layout, places: Sequence[_Free], nodes: Sequence[Node], expert_ranks: int
) -> tuple[Seat, ...]:
    """Seats of one engine; takes its devices out of the places."""
    if expert_ranks:
        places = [_place_of_all(layout, places, nodes, expert_ranks)]
    seats: list[Seat] = []
    used: Counter[tuple[str, Kind]] = Counter()
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
            f"layout {layout} with {expert_ranks} expert ranks (experts.ranks) needs {gpus} GPUs "
            f"and {sockets} CPU sockets of one node. There are: {_there(nodes)}. "
            "cpu.ranks_per_socket splits a socket into several."
        )
    return found


def _seat(
    place: _Free, rank: int, stage: int, tensor_rank: int, kind: Kind, local_rank: int
) -> Seat:
    node = place.node
    socket = None
    cpus = 0.0
    if kind == "gpu":
        place.gpus -= 1
    else:
        socket = place.sockets.pop(0)
        # Shares that overlap (more ranks than cores) must still fit into the node's CPUs.
        cpus = min(float(len(socket.cores)), len(node.host.cores) / max(1, len(node.sockets)))
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
        socket=socket,
        bundle_cpus=cpus,
    )


def _no_room(layout: Layout, stage: int, kind: Kind, nodes: Sequence[Node]) -> str:
    return (
        f"layout {layout} needs {layout.count('gpu')} GPUs and {layout.count('cpu')} sockets; "
        f"no {kind} is left for stage {stage}. There are: {_there(nodes)}."
    )


def _there(nodes: Sequence[Node]) -> str:
    return "; ".join(
        f"{node.host.name} ({node.address}): {node.gpus} GPUs, {len(node.sockets)} sockets"
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

"""Which rank sits on which node and socket, and the Ray bundle that stands for its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from placement.errors import LayoutError
from placement.layout import Kind, Layout
from placement.topology import Host, Socket

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
    """GPUs that Ray knows there."""
    cpus: float
    """CPUs that Ray knows there."""
    is_driver: bool = False
    holders: tuple[str, ...] = ()
    """Who holds the other sockets, for messages."""


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

    @property
    def device(self) -> str:
        """What the rank computes on, for people."""
        if self.socket is None:
            return f"gpu {self.local_rank}"
        nodes = ",".join(map(str, self.socket.numa_nodes))
        return f"socket {self.socket.id} (NUMA {nodes}, {len(self.socket.cores)} cores)"


@dataclass
class _Free:
    node: Node
    gpus: int
    sockets: list[Socket]
    used: dict[str, int] = field(default_factory=lambda: {"cpu": 0, "gpu": 0})

    def room(self, stage: Sequence[Kind]) -> bool:
        return stage.count("gpu") <= self.gpus and stage.count("cpu") <= len(self.sockets)


def assign(layout: Layout, nodes: Sequence[Node]) -> tuple[Seat, ...]:
    """Seat every rank, the ranks of a stage on one node wherever one has the room.

    The driver's node comes first, then nodes by address, so the same input gives the same seats.

    Raises:
        LayoutError: the nodes together have too few devices of a kind.

    """
    free = [
        _Free(node, node.gpus, list(node.sockets))
        for node in sorted(nodes, key=lambda node: (not node.is_driver, node.address))
    ]
    seats: list[Seat] = []
    for stage, kinds in enumerate(layout.stages):
        home = next((place for place in free if place.room(kinds)), None)
        for tensor_rank, kind in enumerate(kinds):
            place = home or next((p for p in free if p.room((kind,))), None)
            if place is None:
                raise LayoutError(_no_room(layout, stage, kind, nodes))
            seats.append(_seat(place, len(seats), stage, tensor_rank, kind))
    return tuple(seats)


def _seat(place: _Free, rank: int, stage: int, tensor_rank: int, kind: Kind) -> Seat:
    node = place.node
    socket = None
    cpus = 0.0
    if kind == "gpu":
        place.gpus -= 1
    else:
        socket = place.sockets.pop(0)
        # Shares that overlap (more ranks than cores) must still fit into the node's CPUs.
        cpus = min(float(len(socket.cores)), len(node.host.cores) / max(1, len(node.sockets)))
    place.used[kind] += 1
    return Seat(
        rank=rank,
        stage=stage,
        tensor_rank=tensor_rank,
        kind=kind,
        node_id=node.node_id,
        address=node.address,
        node_name=node.host.name,
        local_rank=place.used[kind] - 1,
        is_driver_node=node.is_driver,
        socket=socket,
        bundle_cpus=cpus,
    )


def _no_room(layout: Layout, stage: int, kind: Kind, nodes: Sequence[Node]) -> str:
    there = "; ".join(
        f"{node.host.name} ({node.address}): {node.gpus} GPUs, {len(node.sockets)} sockets"
        for node in nodes
    )
    return (
        f"layout {layout} needs {layout.count('gpu')} GPUs and {layout.count('cpu')} sockets; "
        f"no {kind} is left for stage {stage}. There are: {there}."
    )


def bundle_of(seat: Seat, accelerator_type: str | None = None) -> dict[str, float]:
    """The Ray bundle that reserves a seat's device on its node.

    Args:
        seat: a rank's seat.
        accelerator_type: Ray's accelerator type that a GPU must be of, for example H100.

    """
    bundle: dict[str, float] = {f"node:{seat.address}": NODE_SLIVER}
    if seat.kind == "cpu":
        return bundle | {"CPU": seat.bundle_cpus}
    bundle["GPU"] = 1
    if accelerator_type is not None:
        bundle[f"accelerator_type:{accelerator_type}"] = NODE_SLIVER
    return bundle

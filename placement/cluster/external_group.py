"""A placement group that somebody else made: what its bundles offer, and which rank gets which.

Ray Train, Tune and Serve start an engine inside a group of theirs.  The engine then takes nothing
outside of it: a bundle with one GPU is for a GPU rank; a bundle with CPUs and no GPU is for a CPU
rank, which computes on as many cores of one socket.  Bundles that are left over stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from placement.cluster.assignment import Node, Seat
from placement.errors import LayoutError
from placement.given import shown
from placement.host.topology import Core, Socket


@dataclass(frozen=True)
class Bundle:
    """One bundle of a group, where it landed."""

    index: int
    node_id: str
    cpus: float = 0
    gpus: float = 0

    def __str__(self) -> str:
        return f"{self.index}: {{CPU: {self.cpus:g}, GPU: {self.gpus:g}}}"


@dataclass(frozen=True)
class Offer:
    """Device that one bundle gives a rank: a GPU, or cores of one socket."""

    bundle: int
    node_id: str
    socket: Socket | None = None
    """The cores of a CPU rank; None is a GPU."""


def chosen_bundles(bundles: Sequence[Bundle], numbers: str) -> tuple[Bundle, ...]:
    """The bundles that VLLM_RAY_BUNDLE_INDICES names, in the group's order; all where it is empty.

    Raises:
        LayoutError: it is no list of different numbers of bundles of the group.

    """
    if not numbers:
        return tuple(bundles)
    there = {str(bundle.index): bundle for bundle in bundles}
    asked = [part.strip() for part in numbers.split(",")]
    if len(set(asked)) < len(asked) or not set(asked) <= set(there):
        raise LayoutError(
            f"VLLM_RAY_BUNDLE_INDICES: expected different numbers of the group's bundles "
            f"({', '.join(there)}) with commas between them, got {shown(numbers)}"
        )
    return tuple(bundle for index, bundle in there.items() if index in asked)


def offers_of(nodes: Sequence[Node], bundles: Sequence[Bundle]) -> tuple[Offer, ...]:
    """Devices that the bundles give, the largest first.

    A CPU bundle gives as many free cores of one socket as it has CPUs, fewer where no socket has
    so many left, nothing where none is left.  Of equal bundles the first one (number 0) comes last:
    there Train, Tune and Serve run what starts the engine.

    Raises:
        LayoutError: a bundle has several GPUs, or a part of one.

    """
    for bundle in bundles:
        if bundle.gpus not in (0, 1):
            raise LayoutError(
                f"bundle {bundle} of the placement group: expected one GPU or none, because every "
                f"rank has a bundle of its own, got {bundle.gpus:g}"
            )
    ordered = sorted(bundles, key=lambda one: (-one.cpus, one.index == 0, one.index))
    return tuple(offer for node in nodes for offer in _offers(node, ordered))


def _offers(node: Node, bundles: Sequence[Bundle]) -> Iterator[Offer]:
    left = [list(socket.cores) for socket in node.sockets]
    for bundle in (bundle for bundle in bundles if bundle.node_id == node.node_id):
        wanted = int(bundle.cpus)
        if bundle.gpus:
            yield Offer(bundle.index, node.node_id)
        elif wanted and any(left):
            enough = (place for place, cores in enumerate(left) if len(cores) >= wanted)
            most = max(range(len(left)), key=lambda place: len(left[place]))
            place = next(enough, most)
            cores, left[place] = left[place][:wanted], left[place][wanted:]
            yield Offer(bundle.index, node.node_id, _part(node.sockets[place], cores))


def _part(socket: Socket, cores: Sequence[Core]) -> Socket:
    """Some cores of a socket, with as large a part of its memory."""
    share = Fraction(len(cores), len(socket.cores))

    def portion(size: int | None) -> int | None:
        return None if size is None else int(size * share)

    return replace(
        socket,
        cores=tuple(cores),
        memory_bytes=portion(socket.memory_bytes),
        free_bytes=portion(socket.free_bytes),
    )


def nodes_within(nodes: Sequence[Node], offers: Sequence[Offer]) -> tuple[Node, ...]:
    """The cluster as far as the offers reach."""
    return tuple(
        replace(
            node,
            gpus=sum(offer.socket is None for offer in mine),
            sockets=tuple(offer.socket for offer in mine if offer.socket is not None),
        )
        for node in nodes
        for mine in [[offer for offer in offers if offer.node_id == node.node_id]]
    )


def bundles_of(seats: Sequence[Seat], offers: Sequence[Offer]) -> tuple[int, ...]:
    """Index of each rank's bundle, by rank.

    Args:
        seats: all ranks, seated on `nodes_within` these offers.
        offers: what the bundles give.

    """
    left = list(offers)
    found = []
    for seat in seats:
        offer = next(
            one for one in left if (one.node_id, one.socket) == (seat.node_id, seat.socket)
        )
        left.remove(offer)
        found.append(offer.bundle)
    return tuple(found)


def describe_group(bundles: Sequence[Bundle], nodes: Sequence[Node]) -> str:
    """The group for messages: what each bundle has, by node."""
    names = {node.node_id: node.label for node in nodes}
    by_node: dict[str, list[str]] = {}
    for bundle in sorted(bundles, key=lambda one: one.index):
        name = names.get(bundle.node_id, bundle.node_id)
        by_node.setdefault(name, []).append(str(bundle))
    there = "; ".join(f"node {name}: {', '.join(listed)}" for name, listed in by_node.items())
    return (
        "This engine is inside a placement group and uses only its bundles, by their numbers: "
        f"{there}. Every rank needs one of its own, {{GPU: 1}} or {{CPU: as many as it gets "
        "cores}}, on a node with free cores; add such bundles, or start the engine outside."
    )

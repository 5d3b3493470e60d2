"""Sockets that a host has for CPU ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

from placement.errors import LayoutError
from placement.host.topology import Core, Host, NumaNode, Socket, SocketUnit


def sockets_of(host: Host, unit: SocketUnit = "package", shares: int = 1) -> tuple[Socket, ...]:
    """Sockets in the order packages → NUMA nodes → shares.

    The default is one rank per CPU package, also where sub-NUMA clustering (SNC, NPS) cuts the
    package into nodes.  A decode step is bound by reading every weight once, and a package's
    memory controllers give the same together whether one rank or four read through them, as long
    as the rank's pages are interleaved over its nodes (`native.set_membind`) and not heaped on
    the first.  Each further rank costs on every step: one more member of every all-reduce or one
    more stage boundary, a second copy of what is not split (norms, activations, often the
    embeddings) and one more process with cores to spare.  Against that stands the longer way to
    another node of the same package, hidden by prefetching in a streaming read, and small beside
    the way to the other package.  `numa` is right where a measurement shows that it is.

    Memory-only nodes (CXL expanders, HBM in flat mode) and nodes on which the process may use no
    core are no socket.  A node over several packages, or of an unknown one, is a socket of its own.

    Args:
        host: the machine as the process may use it.
        unit: what one socket is before it is split.
        shares: into how many equal shares of its cores each socket is split.  Cores that do not
            divide evenly are left out of all shares.  With fewer cores than shares, each share
            gets one core, shared with others in turn: slow, and worth a warning to the user.

    Returns:
        Sockets with ids from 0; a share's memory is that of its nodes in proportion to its cores.

    Raises:
        LayoutError: shares below 1.

    """
    if shares < 1:
        raise LayoutError(f"sockets cannot be split into {shares} shares; expected at least 1")
    parts = [part for nodes in _units(host, unit) for part in _split(nodes, shares)]
    return tuple(
        _socket(number, nodes, cores, uses) for number, (nodes, cores, uses) in enumerate(parts)
    )


def _units(host: Host, unit: SocketUnit) -> list[tuple[NumaNode, ...]]:
    """Nodes of each socket, packages first by number, then nodes without one."""
    groups: dict[tuple[bool, int], list[NumaNode]] = {}
    for node in sorted(host.numa_nodes, key=lambda node: node.id):
        if node.cores:
            known = unit == "package" and node.package is not None
            key = (not known, node.package if known and node.package is not None else node.id)
            groups.setdefault(key, []).append(node)
    return [tuple(groups[key]) for key in sorted(groups)]


def _split(
    nodes: tuple[NumaNode, ...], shares: int
) -> Iterator[tuple[tuple[NumaNode, ...], tuple[Core, ...], Counter[int]]]:
    """Nodes, cores and, for each core's first CPU, in how many of the shares that core is."""
    cores = tuple(core for node in nodes for core in node.cores)
    size = max(1, len(cores) // shares)
    starts = [share * len(cores) // shares for share in range(shares)]
    if len(cores) < shares:
        starts = [share % len(cores) for share in range(shares)]
    uses = Counter(core.cpus[0] for start in starts for core in cores[start : start + size])
    for start in starts:
        yield nodes, cores[start : start + size], uses


def _socket(
    number: int, nodes: tuple[NumaNode, ...], cores: tuple[Core, ...], uses: Counter[int]
) -> Socket:
    mine = {core.cpus[0] for core in cores}
    parts = [(node, _portion(node, mine, uses)) for node in nodes]
    own = [(node, part) for node, part in parts if part]
    return Socket(
        id=number,
        package=nodes[0].package,
        numa_nodes=tuple(node.id for node, _ in own),
        cores=cores,
        memory_bytes=_total([(node.memory_bytes, part) for node, part in own]),
        free_bytes=_total([(node.free_bytes, part) for node, part in own]),
    )


def _portion(node: NumaNode, mine: set[int], uses: Counter[int]) -> Fraction:
    """Part of the node's memory that falls to a share with these cores."""
    here = [core.cpus[0] for core in node.cores]
    used = sum(uses[cpu] for cpu in here)
    return Fraction(sum(cpu in mine for cpu in here), used) if used else Fraction(0)


def _total(sizes: list[tuple[int | None, Fraction]]) -> int | None:
    """Whole bytes; None if the size of one of the nodes is unknown."""
    known = [size * part for size, part in sizes if size is not None]
    return int(sum(known)) if len(known) == len(sizes) else None

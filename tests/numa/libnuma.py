"""The NUMA nodes as libnuma tells them, to check what `placement.host.sysfs` reads; py-libnuma.

py-libnuma opens the shared library when it is imported and fails there without it (it loads the
process's own symbols instead, or the loader refuses), so it is imported on use only.
"""

from __future__ import annotations

import importlib
from typing import Any

from placement.host.topology import Core, Host, NumaNode


def numa_nodes(host: Host) -> tuple[NumaNode, ...] | None:
    """Nodes of this machine as libnuma tells them; None where libnuma is not there.

    libnuma knows no packages and no SMT siblings: those are taken from `host`, which must be this
    machine, while nodes, CPUs, memory and distances are libnuma's.  Its free memory does not
    count the page cache.
    """
    numa = _library()
    if numa is None:
        return None
    sizes = {node: numa.memory.node_memory_info(node) for node in range(_count(numa))}
    known = {node: size for node, size in sizes.items() if size[0] >= 0}
    mems_allowed = set(numa.memory.get_allocation_allowed_nodes())
    packages = {node.id: node.package for node in host.numa_nodes}
    return tuple(
        NumaNode(
            node,
            packages.get(node),
            _cores(host, _usable_cpus(numa, node)),
            size[0] if node in mems_allowed else 0,
            size[1] if node in mems_allowed else 0,
            tuple(numa.info.numa_distance(node, other) for other in known),
        )
        for node, size in known.items()
    )


def cross_check(host: Host) -> tuple[str, ...]:
    """What libnuma and `host` tell differently, in words; nothing where libnuma is not there.

    Free memory is left out: it changes from one look to the next.
    """
    theirs = numa_nodes(host)
    if theirs is None:
        return ()
    ids = [node.id for node in theirs]
    if ids != [node.id for node in host.numa_nodes]:
        return (f"NUMA nodes: {[node.id for node in host.numa_nodes]} in /sys, {ids} in libnuma",)
    return tuple(
        f"NUMA node {ours.id}, {what}: {mine} in /sys, {other} in libnuma"
        for ours, theirs_ in zip(host.numa_nodes, theirs, strict=True)
        for (what, mine), (_, other) in zip(_facts(ours), _facts(theirs_), strict=True)
        if mine != other
    )


def _facts(node: NumaNode) -> tuple[tuple[str, object], ...]:
    cpus = sorted(cpu for core in node.cores for cpu in core.cpus)
    return (("CPUs", cpus), ("memory", node.memory_bytes), ("distances", node.distances))


def _library() -> Any | None:
    try:
        numa = importlib.import_module("numa")
    except (ImportError, OSError, AttributeError, TypeError):
        return None
    # Another package on the index is called numa too.
    if not hasattr(numa, "LIBNUMA") or not numa.info.numa_available():
        return None
    return numa


def _count(numa: Any) -> int:
    return int(numa.info.get_max_node()) + 1


def _usable_cpus(numa: Any, node: int) -> set[int]:
    return set(numa.info.node_to_cpus(node)).intersection(numa.schedule.get_affinitive_cpus(0))


def _cores(host: Host, cpus: set[int]) -> tuple[Core, ...]:
    """These CPUs put together to cores as the host's are; one that the host lacks stands alone."""
    core_of = {cpu: core.cpus for core in host.cores for cpu in core.cpus}
    cores = {tuple(sorted(cpus.intersection(core_of.get(cpu, (cpu,))))) for cpu in cpus}
    return tuple(Core(core) for core in sorted(cores))

"""Read a host from /sys and /proc.  Every path is below a root that tests can choose.

Read it before anything pins the calling thread (libgomp does when it loads with
GOMP_CPU_AFFINITY): the thread's affinity is taken for what the user allows this process.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from placement.errors import TopologyError
from placement.host import cgroup
from placement.host.cpulist import format_cpulist
from placement.host.gpus import read_gpus
from placement.host.instruction_sets import INSTRUCTION_SETS, allowed
from placement.host.topology import Core, Host, NumaNode
from placement.host.tree import Tree, integer, one_line

NODES = "sys/devices/system/node"
CPUS = "sys/devices/system/cpu"
GIVEN_BACK = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
"""Memory that an allocation on a node can get: free pages and cache that the kernel drops."""
KIBIBYTE = 1024


def machine_id(root: Path = Path("/")) -> str:
    """The same for all processes of a running machine, in containers too; empty if unknown."""
    return (Tree(root).find_text("proc/sys/kernel/random/boot_id") or "").strip()


def read_host(root: Path = Path("/"), *, gpus: bool = True) -> Host:
    """The host as this process may use it.

    Args:
        root: directory that stands for `/`; only the real one's instruction sets are limited by the
            environment, see `placement.host.instruction_sets`.
        gpus: whether to ask for GPUs too.

    Raises:
        TopologyError: a file or the environment is malformed, or nothing usable is left; names it
            and what was expected.

    """
    tree = Tree(root)
    numa_nodes = _read_nodes(tree)
    flags, model = _cpuinfo(tree)
    return Host(
        name=one_line(tree.find_text("proc/sys/kernel/hostname") or platform.node()),
        numa_nodes=numa_nodes,
        gpus=read_gpus(root) if gpus else (),
        instruction_sets=allowed(flags) if root == Path("/") else flags & INSTRUCTION_SETS,
        memory_limit_bytes=cgroup.memory_limit_bytes(tree),
        cpu_limit=cgroup.cpu_limit(tree),
        offline_cpus=_offline(tree),
        cpu_model=model,
    )


def _read_nodes(tree: Tree) -> tuple[NumaNode, ...]:
    online = _online_cpus(tree)
    usable = online & _allowed(tree, "Cpus_allowed_list", online)
    if not usable:
        raise TopologyError(
            f"{tree.root}: none of the online CPUs {format_cpulist(online)} is in the cpuset or "
            "affinity of this process (Cpus_allowed_list); expected at least one"
        )
    node_ids = _node_ids(tree)
    if node_ids is None:
        return (_single_node(tree, online, usable),)
    cpus_of = {node: set(tree.find_list(f"{NODES}/node{node}/cpulist") or ()) for node in node_ids}
    _check_every_cpu_has_one_node(tree, online, cpus_of)
    memory_nodes = _allowed(tree, "Mems_allowed_list", set(node_ids))
    return tuple(
        NumaNode(
            node,
            _package(tree, cpus_of[node] & online),
            _cores(tree, cpus_of[node] & usable),
            *(_node_memory(tree, node, node_ids) if node in memory_nodes else (0, 0)),
            distances=_distances(tree, node, len(node_ids)),
        )
        for node in node_ids
    )


def _node_memory(tree: Tree, node: int, node_ids: Sequence[int]) -> tuple[int, int]:
    """(total, available) bytes of one NUMA node.

    A sandbox that makes memory up as it is used shows a node with little; where the node is the
    whole machine, /proc/meminfo knows better.
    """
    own = _meminfo(tree, f"{NODES}/node{node}/meminfo")
    if len(node_ids) > 1 or not tree.exists("proc/meminfo"):
        return own
    return max(own, _meminfo(tree, "proc/meminfo"))


def _single_node(tree: Tree, online: set[int], usable: set[int]) -> NumaNode:
    """The whole machine, where the kernel has no NUMA support or /sys does not show it."""
    total, free = _meminfo(tree, "proc/meminfo")
    return NumaNode(0, _package(tree, online), _cores(tree, usable), total, free)


def _node_ids(tree: Tree) -> tuple[int, ...] | None:
    """Online nodes; None where the kernel shows none."""
    listed = tree.find_list(f"{NODES}/online")
    if listed is not None:
        missing = [node for node in listed if not tree.exists(f"{NODES}/node{node}")]
        if listed and len(missing) == len(listed):  # some sandboxes show this file alone
            return None
        if missing or not listed:
            what = f"node{missing[0]} is listed but not there" if missing else "no node is listed"
            raise TopologyError(f"{tree.root / NODES}/online: {what}; expected the online nodes")
        return listed
    found = (re.fullmatch(r"node(\d{1,5})", path.name) for path in (tree.root / NODES).glob("*"))
    return tuple(sorted(int(match[1]) for match in found if match)) or None


def _online_cpus(tree: Tree) -> set[int]:
    listed = tree.find_list(f"{CPUS}/online")
    if listed is None:
        raise TopologyError(f"{tree.root / CPUS}/online: expected the list of online CPUs, no file")
    if not listed:
        raise tree.wrong(f"{CPUS}/online", "at least one CPU", "")
    return set(listed)


def _offline(tree: Tree) -> tuple[int, ...]:
    # The file `offline` also lists numbers that could be plugged in but are not present.
    present = tree.find_list(f"{CPUS}/present") or ()
    return tuple(sorted(set(present) - _online_cpus(tree)))


def _allowed(tree: Tree, key: str, everything: set[int]) -> set[int]:
    """Numbers that /proc/self/status allows; everything where it does not say."""
    path = "proc/self/status"
    for line in (tree.find_text(path) or "").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return set(tree.parse_list(path, value))
    return everything


def _check_every_cpu_has_one_node(
    tree: Tree, online: set[int], cpus_of: dict[int, set[int]]
) -> None:
    node_of: dict[int, int] = {}
    for node, cpus in cpus_of.items():
        for cpu in cpus & online:
            if cpu in node_of:
                where = tree.root / NODES / f"node{node}" / "cpulist"
                raise TopologyError(
                    f"{where}: CPU {cpu} is on node {node_of[cpu]} and on node {node}; "
                    "expected every CPU on one node"
                )
            node_of[cpu] = node
    if stray := online - node_of.keys():
        raise TopologyError(
            f"{tree.root / NODES}: no node has the online CPUs {format_cpulist(stray)}; "
            "expected every CPU in one node*/cpulist"
        )


def _package(tree: Tree, cpus: Iterable[int]) -> int | None:
    """The one package of these CPUs; None if they are on several or the system does not say."""
    files = (f"{CPUS}/cpu{cpu}/topology/physical_package_id" for cpu in cpus)
    packages = {tree.find_integer(file) for file in files}
    package = packages.pop() if len(packages) == 1 else None
    return None if package is None or package < 0 else package


def _cores(tree: Tree, usable: set[int]) -> tuple[Core, ...]:
    cores = {Core(tuple(sorted(_siblings(tree, cpu) & usable))) for cpu in usable}
    seen = sorted(cpu for core in cores for cpu in core.cpus)
    if seen != sorted(usable):
        twice = next(cpu for cpu in seen if seen.count(cpu) > 1)
        raise TopologyError(
            f"{tree.root / CPUS}/cpu{twice}/topology: CPU {twice} is on several cores; "
            "expected the same list of siblings at each of them"
        )
    return tuple(sorted(cores, key=lambda core: core.cpus))


def _siblings(tree: Tree, cpu: int) -> set[int]:
    """Logical CPUs of the core that `cpu` is on."""
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second until Linux 5.0
        path = f"{CPUS}/cpu{cpu}/topology/{name}"
        siblings = tree.find_list(path)
        if siblings is not None:
            if cpu not in siblings:
                raise tree.wrong(path, f"a list with CPU {cpu} itself", tree.text(path))
            return set(siblings)
    return {cpu}


def _meminfo(tree: Tree, path: str) -> tuple[int, int]:
    """(total, available) bytes of lines `Node 0 MemTotal: 123 kB` or `MemTotal: 123 kB`."""
    content = tree.text(path)
    found = re.findall(r"^(?:Node +\d+ +)?([\w()]+): +(\d{1,15}) kB$", content, re.MULTILINE)
    sizes = {name: int(kibibytes) * KIBIBYTE for name, kibibytes in found}
    if "MemTotal" not in sizes or "MemFree" not in sizes:
        raise tree.wrong(path, "lines MemTotal and MemFree in kB", content)
    if sizes["MemFree"] > sizes["MemTotal"]:
        numbers = f"MemTotal {sizes['MemTotal']}, MemFree {sizes['MemFree']} bytes"
        raise tree.wrong(path, "no more memory free than there is", numbers)
    given_back = sum(sizes.get(name, 0) for name in GIVEN_BACK)
    return sizes["MemTotal"], min(given_back, sizes["MemTotal"])


def _distances(tree: Tree, node: int, nodes: int) -> tuple[int, ...]:
    path = f"{NODES}/node{node}/distance"
    content = tree.find_text(path)
    if content is None:
        return ()
    distances = tuple(number for field in content.split() if (number := integer(field)) is not None)
    if len(distances) != nodes or len(content.split()) != nodes:
        raise tree.wrong(path, f"{nodes} distances, one for each online node", content)
    return distances


def _cpuinfo(tree: Tree) -> tuple[frozenset[str], str | None]:
    """(flags that all processors have, model name); nothing known where there is no file."""
    content = tree.find_text("proc/cpuinfo") or ""
    lines = set(re.findall(r"^(?:flags|Features)\s*:(.*)$", content, re.MULTILINE))
    flags = [frozenset(line.split()) for line in lines]
    model = re.search(r"^model name\s*: *(.+)$", content, re.MULTILINE)
    name = one_line(model[1]) if model else None
    return frozenset.intersection(*flags) if flags else frozenset(), name

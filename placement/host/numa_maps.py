"""Pages by NUMA node from /proc/PID/numa_maps, where the container's seccomp forbids move_pages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from placement.host.tree import Tree

PAGE_KIB = 4
_DELETED = "\\040(deleted)"
"""Suffix of the name of memory that has no name in a file system."""


def pages_per_node(
    address: int, nbytes: int, *, root: Path = Path("/"), pid: str = "self"
) -> dict[int, int]:
    """Pages of an address range by node, -1 = not present, in pages of 4 KiB.

    The kernel counts by mapping: of a mapping that is only partly in the range the same part of
    each node's pages is counted, so the answer is exact for whole mappings and close for the large
    ones that weights and KV blocks are in.

    Raises:
        TopologyError: the files are not there or not readable.

    """
    tree = Tree(root)
    placed = dict(_numa_maps(tree, f"proc/{pid}/numa_maps"))
    counts: Counter[int] = Counter()
    for start, end in _mappings(tree, f"proc/{pid}/maps"):
        common = min(end, address + nbytes) - max(start, address)
        if common > 0:
            nodes = placed.get(start, {})
            pages = round(common / (PAGE_KIB << 10))
            here = {node: round(n * common / (end - start)) for node, n in nodes.items()}
            counts.update(here)
            counts[-1] += max(0, pages - sum(here.values()))
    return {node: count for node, count in counts.items() if count}


def anonymous_pages(
    also: str | None = None, *, root: Path = Path("/"), pid: str = "self"
) -> dict[int, int]:
    """Resident anonymous pages of a process by node, in pages of 4 KiB.

    Mapped files and shared memory are left out.

    Args:
        also: how names of shared memory end that is counted too.
        root: of the files that are read.
        pid: of the process.

    Raises:
        TopologyError: the file is not there or not readable.

    """
    counts: Counter[int] = Counter()
    for line in Tree(root).text(f"proc/{pid}/numa_maps").splitlines():
        _, _, rest = line.partition(" ")
        name = re.search(r" file=(\S+)", rest)
        if name is None or (also and name[1].removesuffix(_DELETED).endswith(also)):
            counts.update(_placed(rest))
    return dict(counts)


def _mappings(tree: Tree, path: str) -> Iterator[tuple[int, int]]:
    for line in tree.text(path).splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if match is None:
            raise tree.wrong(path, "lines such as 7f00-7f01 rw-p …", line)
        yield int(match[1], 16), int(match[2], 16)


def _numa_maps(tree: Tree, path: str) -> Iterator[tuple[int, dict[int, int]]]:
    """Start of each mapping and its pages by node, in pages of 4 KiB."""
    for line in tree.text(path).splitlines():
        start, _, rest = line.partition(" ")
        yield int(start, 16), _placed(rest)


def _placed(rest: str) -> dict[int, int]:
    """Pages by node of one line, in pages of 4 KiB."""
    size = re.search(r"kernelpagesize_kB=(\d+)", rest)
    scale = int(size[1]) // PAGE_KIB if size else 1
    counts = re.findall(r"\bN(\d+)=(\d+)", rest)
    return {int(node): int(pages) * scale for node, pages in counts}

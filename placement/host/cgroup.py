"""Limits of this process's control groups: memory and CPU time, cgroup v1 and v2.

A limit of an outer group holds for all groups in it, so the smallest on the way up counts.  In a
container without a cgroup namespace /proc/self/cgroup names a path of the host that is not mounted
inside; the group is then the mount's root, which every walk ends at.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from placement.host.tree import Tree, integer

UNLIMITED = 1 << 60
"""cgroup v1 writes 2^63 less one page where there is no limit; no machine has an exabyte."""
V2_MOUNTS = ("sys/fs/cgroup", "sys/fs/cgroup/unified")


def memory_limit_bytes(tree: Tree) -> int | None:
    """Smallest memory limit of this process's group and those around it; None if none."""
    limits = [_bytes(tree, f"{folder}/memory.max") for folder in _v2_groups(tree)]
    limits += [
        _bytes(tree, f"{folder}/memory.limit_in_bytes") for folder in _v1_groups(tree, "memory")
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def cpu_limit(tree: Tree) -> float | None:
    """Smallest CPU quota in CPUs' worth of time (2.5 = two and a half); None if none."""
    limits = [_quota_v2(tree, f"{folder}/cpu.max") for folder in _v2_groups(tree)]
    limits += [_quota_v1(tree, folder) for folder in _v1_groups(tree, "cpu")]
    return min((limit for limit in limits if limit is not None), default=None)


def _v2_groups(tree: Tree) -> Iterator[str]:
    for hierarchy, path in _memberships(tree):
        if hierarchy == "":
            for mount in V2_MOUNTS:
                yield from _upwards(mount, path)


def _v1_groups(tree: Tree, controller: str) -> Iterator[str]:
    for hierarchy, path in _memberships(tree):
        if controller in hierarchy.split(","):
            yield from _upwards(f"sys/fs/cgroup/{controller}", path)


def _memberships(tree: Tree) -> Iterator[tuple[str, str]]:
    """Lines `4:memory:/path` (v1) and `0::/path` (v2) as (controllers, path)."""
    for line in (tree.find_text("proc/self/cgroup") or "").splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3:
            raise tree.wrong("proc/self/cgroup", "lines such as 0::/user.slice", line)
        yield fields[1], fields[2]


def _upwards(mount: str, path: str) -> Iterator[str]:
    # A group outside the namespace's root reads /../name: nothing of it is mounted here.
    group = PurePosixPath("/") if ".." in path else PurePosixPath("/", path)
    for folder in (group, *group.parents):
        yield f"{mount}{folder}".rstrip("/")


def _bytes(tree: Tree, path: str) -> int | None:
    content = tree.find_text(path)
    if content is None or content.strip() == "max":
        return None
    limit = integer(content.strip())
    if limit is None:
        raise tree.wrong(path, "bytes or max", content)
    return limit if limit < UNLIMITED else None


def _quota_v2(tree: Tree, path: str) -> float | None:
    content = tree.find_text(path)
    if content is None or content.startswith("max"):
        return None
    quota, period = ([integer(field) for field in content.split()] + [None, None])[:2]
    if len(content.split()) != 2 or quota is None or not period:
        raise tree.wrong(path, "quota and period in µs, such as 200000 100000", content)
    return quota / period


def _quota_v1(tree: Tree, folder: str) -> float | None:
    quota = tree.find_integer(f"{folder}/cpu.cfs_quota_us")
    period = tree.find_integer(f"{folder}/cpu.cfs_period_us")
    if quota is None or quota <= 0 or not period:
        return None
    return quota / period

"""Proof of where a CPU rank computes: its pages by NUMA node, its threads by core."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from placement.errors import NativeError, TopologyError
from placement.host import native, numa_maps
from ray_hetero.errors import RankError
from ray_hetero.runtime.shared_pages import own_name

MIB_PER_PAGE = numa_maps.PAGE_KIB / 1024


@dataclass(frozen=True)
class PlacementProof:
    """Pages and threads found in one CPU rank's process."""

    own_nodes: tuple[int, ...]
    pages: Mapping[int, int]
    """Resident pages of 4 KiB by NUMA node."""
    what: str
    """Description of the pages that were counted."""
    cores: int
    """Cores that the rank computes on."""
    bound: int
    """Number of the rank's cores that have a thread which may run there only."""

    @property
    def foreign_share(self) -> float | None:
        """Share of the pages on other nodes than its own; None where no page was counted."""
        total = sum(self.pages.values())
        own = sum(self.pages.get(node, 0) for node in self.own_nodes)
        return (total - own) / total if total else None

    def __str__(self) -> str:
        threads = f"{self.bound} of {self.cores} cores have a thread bound to them"
        nodes = ", ".join(map(str, self.own_nodes))
        if self.foreign_share is None:
            return f"placement unknown ({self.what}); {threads}"
        mib = sum(self.pages.values()) * MIB_PER_PAGE
        elsewhere = ", ".join(
            f"node {node} {pages * MIB_PER_PAGE:.0f} MiB"
            for node, pages in sorted(self.pages.items())
            if node not in self.own_nodes and pages
        )
        return (
            f"{1 - self.foreign_share:.1%} of {mib:.0f} MiB {self.what} on its own NUMA "
            f"{'node' if len(self.own_nodes) == 1 else 'nodes'} {nodes}"
            f"{f' (elsewhere: {elsewhere})' if elsewhere else ''}; {threads}"
        )


def prove(tensors: Iterable[Any], own_nodes: Sequence[int], cpus: Sequence[int]) -> PlacementProof:
    """Look at this process.

    The kernel's account of the whole process comes first: vLLM's CPU kernels keep packed copies
    of the weights that no tensor points to.  Memory that this process shares with others counts,
    what they share with it does not.

    Args:
        tensors: weights and KV caches, counted where that account cannot be read.
        own_nodes: NUMA nodes that the rank's memory belongs on.
        cpus: logical CPUs that it computes on.

    """
    try:
        pages, what = numa_maps.anonymous_pages(own_name()), "of its memory"
    except TopologyError:
        pages, what = _tensor_pages(tensors)
    alone = {allowed[0] for allowed in native.thread_cpus().values() if len(allowed) == 1}
    return PlacementProof(
        own_nodes=tuple(own_nodes),
        pages=pages,
        what=what,
        cores=len(cpus),
        bound=len(alone & set(cpus)),
    )


def _tensor_pages(tensors: Iterable[Any]) -> tuple[dict[int, int], str]:
    counts: Counter[int] = Counter()
    try:
        for address, nbytes in _storages(tensors):
            # All pages, not a sample: counts of several tensors must add up.
            counts.update(native.pages_per_node(address, nbytes, sample=0))
    except NativeError as error:
        return {}, str(error)
    return {node: pages for node, pages in counts.items() if node >= 0}, "of weights and KV cache"


def _storages(tensors: Iterable[Any]) -> list[tuple[int, int]]:
    """Address and length of each storage, tied weights once."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == "cpu" and storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return sorted(found.items())


def flat(caches: Iterable[Any]) -> Iterator[Any]:
    """The tensors of a model runner's KV caches, which has lists of them for some layers."""
    for cache in caches:
        if isinstance(cache, list | tuple):
            yield from flat(cache)
        else:
            yield cache


def check(proof: PlacementProof, limit: float | None) -> None:
    """Compare the foreign share with the largest that the user allows.

    Raises:
        RankError: the share is above it, or is not known.

    """
    if limit is None:
        return
    share = proof.foreign_share
    if share is None or share > limit:
        raise RankError(
            f"{proof}. cpu.max_remote_memory_fraction allows {limit:.1%} of a rank's memory on "
            "other NUMA nodes. Free memory on the rank's own nodes (`ray-hetero topology`), or "
            "raise cpu.max_remote_memory_fraction."
        )

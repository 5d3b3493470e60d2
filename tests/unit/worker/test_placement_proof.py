"""What a CPU rank says about its pages and threads, and when that is an error."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from placement.errors import NativeError, TopologyError
from placement.host import native, numa_maps
from ray_hetero.errors import RankError
from ray_hetero.worker import placement_proof
from ray_hetero.worker.placement_proof import PlacementProof, check, flat, prove

MIB = 256
"""Pages of one MiB."""


def proof(pages: dict[int, int], own: tuple[int, ...] = (0,)) -> PlacementProof:
    return PlacementProof(own, pages, "of its memory", cores=4, bound=3)


def test_shares() -> None:
    assert proof({0: 100}).foreign_share == 0
    assert proof({0: 75, 1: 25}).foreign_share == 0.25
    assert proof({0: 50, 1: 40, 2: 10}, own=(0, 1)).foreign_share == 0.1
    assert proof({1: 5}).foreign_share == 1
    assert proof({}).foreign_share is None


def test_lines() -> None:
    assert str(proof({0: 90 * MIB, 1: 10 * MIB})) == (
        "90.0% of 100 MiB of its memory on its own NUMA node 0 (elsewhere: node 1 10 MiB); "
        "3 of 4 cores have a thread bound to them"
    )
    assert str(proof({0: MIB, 1: MIB}, own=(0, 1))) == (
        "100.0% of 2 MiB of its memory on its own NUMA nodes 0, 1; "
        "3 of 4 cores have a thread bound to them"
    )
    assert "placement unknown" in str(proof({}))


def test_memory_on_other_nodes_is_refused_beyond_the_limit() -> None:
    check(proof({0: 9, 1: 1}), None)
    check(proof({0: 9, 1: 1}), 0.1)
    check(proof({}), None)
    with pytest.raises(
        RankError, match=r"90.0% .*cpu.max_remote_memory_fraction allows 5.0% of a rank's memory"
    ):
        check(proof({0: 9, 1: 1}), 0.05)
    with pytest.raises(RankError, match="placement unknown"):
        check(proof({}), 0.5)


NUMA_MAPS = """\
7f0000000000 bind:0 anon=300 dirty=300 active=0 N0=200 N1=100 kernelpagesize_kB=4
7f0100000000 default file=/lib/libc.so.6 mapped=40 mapmax=9 N1=40 kernelpagesize_kB=4
7f0200000000 bind:0 huge anon=2 dirty=2 N0=2 kernelpagesize_kB=2048
7f0300000000 default heap anon=5 dirty=5 N1=5 kernelpagesize_kB=4
7f0400000000 default file=/dev/shm/psm_1 dirty=9 N1=9 kernelpagesize_kB=4
7f0480000000 default file=/memfd:ray_hetero-kv.7\\040(deleted) dirty=3 N0=3 kernelpagesize_kB=4
7f0490000000 default file=/memfd:ray_hetero-kv.17 dirty=8 N1=8 kernelpagesize_kB=4
7f0500000000 default stack
"""


def test_anonymous_pages_leave_files_and_shared_memory_out(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/numa_maps").write_text(NUMA_MAPS)
    assert numa_maps.anonymous_pages(root=tmp_path) == {0: 200 + 2 * 512, 1: 100 + 5}
    # What this process shares with others counts, what they share with it does not.
    assert numa_maps.anonymous_pages(".7", root=tmp_path)[0] == 200 + 2 * 512 + 3
    with pytest.raises(TopologyError, match="numa_maps: expected a file"):
        numa_maps.anonymous_pages(root=tmp_path / "elsewhere")


def no_account(*_: object, **__: object) -> dict[int, int]:
    raise TopologyError("no numa_maps")


def test_tensors_are_counted_where_the_process_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa_maps, "anonymous_pages", no_account)
    weights = torch.ones(4 << 20)
    tied, elsewhere = weights[1:], torch.empty(1 << 20, device="meta")
    counted: list[tuple[int, int]] = []

    def pages(address: int, nbytes: int, *, sample: int) -> dict[int, int]:
        counted.append((address, nbytes))
        return {0: 3, 1: 1, -1: 7}

    monkeypatch.setattr(native, "pages_per_node", pages)
    found = prove([weights, tied, elsewhere, torch.empty(0)], (0,), (0,))
    assert counted == [(weights.data_ptr(), 16 << 20)]
    assert found.pages == {0: 3, 1: 1}
    assert found.what == "of weights and KV cache"


def test_without_any_account_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> dict[int, int]:
        raise NativeError("seccomp forbids it")

    monkeypatch.setattr(numa_maps, "anonymous_pages", no_account)
    monkeypatch.setattr(native, "pages_per_node", refused)
    found = prove([torch.ones(4)], (0,), (0,))
    assert str(found).startswith("placement unknown (seccomp forbids it)")


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="kernel without NUMA")
def test_this_process() -> None:
    """A big tensor shows up, on nodes that there are."""
    before = sum(prove([], (0,), ()).pages.values())
    # Pages of its own: an allocator may have some left over.
    pages = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    weights = torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
    found = prove([weights], range(1024), ())
    assert found.foreign_share == 0
    assert sum(found.pages.values()) - before > 60 * MIB


def test_threads_bound_to_one_core_are_counted() -> None:
    usable = sorted(os.sched_getaffinity(0))
    ready, done = threading.Event(), threading.Event()

    def compute() -> None:
        os.sched_setaffinity(0, {usable[0]})
        ready.set()
        done.wait()

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        ready.wait()
        found = prove([], (0,), (usable[0], 100_000))
    finally:
        done.set()
        thread.join()
    assert (found.bound, found.cores) == (1, 2)


def test_kv_caches_are_flat() -> None:
    caches: list[Any] = [torch.zeros(1), [torch.zeros(2), torch.zeros(3)], ()]
    assert [tensor.numel() for tensor in flat(caches)] == [1, 2, 3]
    assert list(placement_proof.flat([])) == []

"""The native module and its ctypes twin, against each other and against the kernel's own counts."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from placement.errors import NativeError
from placement.host import native, numa_maps, syscalls
from placement.host.sysfs import read_host

PAGE = mmap.PAGESIZE
PAGES = 64
ROOT = Path(__file__).parents[3]

_native = pytest.importorskip("placement._native", reason="the native module was not built")


@pytest.fixture
def memory() -> Iterator[tuple[mmap.mmap, int]]:
    """Private memory that nobody has touched, and its address."""
    mapped = mmap.mmap(-1, PAGES * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_NOHUGEPAGE)
    view = ctypes.c_char.from_buffer(mapped)
    yield mapped, ctypes.addressof(view)
    del view
    mapped.close()


@pytest.fixture(params=[_native, syscalls], ids=["compiled", "ctypes"])
def pages(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


def touch(mapped: mmap.mmap, count: int) -> None:
    for page in range(count):
        mapped[page * PAGE] = 1


def node() -> int:
    return next(node.id for node in read_host(gpus=False).numa_nodes if node.cores)


def test_pages_are_counted(pages: ModuleType, memory: tuple[mmap.mmap, int]) -> None:
    mapped, address = memory
    assert pages.pages_per_node(address, PAGES * PAGE) == {-1: PAGES}
    touch(mapped, 10)
    counts = pages.pages_per_node(address, PAGES * PAGE)
    assert counts.pop(-1) == PAGES - 10
    assert sum(counts.values()) == 10


@pytest.mark.parametrize(
    ("offset", "nbytes", "count"),
    [(0, 0, 0), (0, 1, 1), (5, PAGE - 5, 1), (5, PAGE, 2), (PAGE - 1, 2, 2), (0, 3 * PAGE, 3)],
)
def test_every_page_with_a_byte_counts(
    pages: ModuleType, memory: tuple[mmap.mmap, int], offset: int, nbytes: int, count: int
) -> None:
    _, address = memory
    assert sum(pages.pages_per_node(address + offset, nbytes).values()) == count


def test_sample_is_spread_over_the_range(pages: ModuleType, memory: tuple[mmap.mmap, int]) -> None:
    mapped, address = memory
    touch(mapped, PAGES // 2)
    counts = pages.pages_per_node(address, PAGES * PAGE, 8)
    assert counts.pop(-1) == 4
    assert sum(counts.values()) == 4


def test_more_pages_than_one_call_takes(pages: ModuleType) -> None:
    count = syscalls.QUERY_BATCH * 2 + 7
    with mmap.mmap(-1, count * PAGE) as mapped:
        view = ctypes.c_char.from_buffer(mapped)
        assert pages.pages_per_node(ctypes.addressof(view), count * PAGE) == {-1: count}
        del view


def test_bound_pages_are_on_the_node(pages: ModuleType, memory: tuple[mmap.mmap, int]) -> None:
    mapped, address = memory
    touch(mapped, PAGES // 2)
    pages.bind_range(address, PAGES * PAGE, [node()])
    touch(mapped, PAGES)
    assert pages.pages_per_node(address, PAGES * PAGE) == {node(): PAGES}
    assert f"bind:{node()}" in policy_of(address)


def policy_of(address: int) -> str:
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{address:08x} "))


def test_interleaving_is_a_policy_of_its_own(
    pages: ModuleType, memory: tuple[mmap.mmap, int]
) -> None:
    _, address = memory
    pages.bind_range(address, PAGES * PAGE, [node()], True, True)
    assert f"interleave:{node()}" in policy_of(address)


@pytest.mark.parametrize("nodes", [[], [1023], [1024], [-1], [1 << 20]])
def test_nodes_that_are_not_there(
    pages: ModuleType, memory: tuple[mmap.mmap, int], nodes: list[int]
) -> None:
    _, address = memory
    with pytest.raises(OSError, match=r"mbind|NUMA node") as caught:
        pages.bind_range(address, PAGE, nodes)
    assert caught.value.errno == errno.EINVAL


def test_memory_that_is_not_there(pages: ModuleType) -> None:
    with pytest.raises(OSError, match="mbind") as caught:
        pages.bind_range(1 << 46, PAGE, [node()])
    assert caught.value.errno == errno.EFAULT


def test_thread_policy_holds_for_new_memory(pages: ModuleType) -> None:
    counts: list[dict[int, int]] = []

    def allocate() -> None:
        pages.set_membind([node()])
        with mmap.mmap(-1, PAGES * PAGE) as mapped:
            touch(mapped, PAGES)
            view = ctypes.c_char.from_buffer(mapped)
            counts.append(pages.pages_per_node(ctypes.addressof(view), PAGES * PAGE))
            del view
        pages.set_membind([])

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    assert counts == [{node(): PAGES}]


def test_numa_maps_counts_the_same(memory: tuple[mmap.mmap, int]) -> None:
    mapped, address = memory
    touch(mapped, 20)
    by_kernel = native.pages_per_node(address, PAGES * PAGE, sample=0)
    assert numa_maps.pages_per_node(address, PAGES * PAGE) == by_kernel


def test_numa_maps_counts_huge_pages_as_their_size(tmp_path: Path) -> None:
    folder = tmp_path / "proc/self"
    folder.mkdir(parents=True)
    (folder / "maps").write_text(
        "7f0000000000-7f0000800000 rw-p 00000000 00:00 0 \n"
        "7f0001000000-7f0001400000 rw-p 00000000 00:0f 1 /anon_hugepage\n"
    )
    (folder / "numa_maps").write_text(
        "7f0000000000 default anon=1536 dirty=1536 N0=1024 N1=512 kernelpagesize_kB=4\n"
        "7f0001000000 bind:1 file=/anon_hugepage huge dirty=2 N1=2 kernelpagesize_kB=2048\n"
    )
    whole = numa_maps.pages_per_node(0x7F0000000000, 0x1400000, root=tmp_path)
    assert whole == {0: 1024, 1: 512 + 1024, -1: 512}
    half = numa_maps.pages_per_node(0x7F0000000000, 0x400000, root=tmp_path)
    assert half == {0: 512, 1: 256, -1: 256}


def test_seccomp_falls_back_to_numa_maps(
    monkeypatch: pytest.MonkeyPatch, memory: tuple[mmap.mmap, int]
) -> None:
    def forbidden(*_: int) -> dict[int, int]:
        raise OSError(errno.EPERM, "move_pages: Operation not permitted")

    mapped, address = memory
    touch(mapped, PAGES)
    monkeypatch.setattr(native, "_native", None)
    monkeypatch.setattr(syscalls, "pages_per_node", forbidden)
    assert sum(native.pages_per_node(address, PAGES * PAGE).values()) == PAGES


def test_refusals_say_why(memory: tuple[mmap.mmap, int], monkeypatch: pytest.MonkeyPatch) -> None:
    _, address = memory
    with pytest.raises(NativeError, match=r"NUMA nodes \[1023\].*not online or not in"):
        native.bind_range(address, PAGE, [1023])
    monkeypatch.setattr(native, "_native", None)
    with pytest.raises(NativeError, match=r"needs the compiled module .* install a C"):
        native.read_bandwidth([0])

    def forbidden(*_: object) -> None:
        raise OSError(errno.EPERM, "mbind: Operation not permitted")

    monkeypatch.setattr(syscalls, "bind_range", forbidden)
    with pytest.raises(NativeError, match="--cap-add SYS_NICE"):
        native.bind_range(address, PAGE, [0])


def test_bandwidth_is_measured_on_the_cpus_asked_for() -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    before = os.sched_getaffinity(0)
    started = time.monotonic()
    rate = native.read_bandwidth(cpus, nbytes_per_thread=8 << 20, seconds=0.2)
    assert 1e8 < rate < 1e13
    assert time.monotonic() - started > 0.2
    assert os.sched_getaffinity(0) == before


def test_bandwidth_lets_other_threads_run() -> None:
    measuring = threading.Thread(
        target=native.read_bandwidth,
        args=[sorted(os.sched_getaffinity(0))[:1]],
        kwargs={"nbytes_per_thread": 4 << 20, "seconds": 0.5},
    )
    measuring.start()
    turns = 0
    while measuring.is_alive():
        turns += 1
        time.sleep(0.01)
    measuring.join()
    assert turns > 5


@pytest.mark.parametrize(
    ("cpus", "nbytes", "seconds"),
    [
        ([], 1 << 20, 0.1),
        ([-1], 1 << 20, 0.1),
        ([65535], 1 << 20, 0.1),
        ([0], 0, 0.1),
        ([0], 1 << 60, 0.1),
        ([0], 1 << 20, 0.0),
        ([0], 1 << 20, float("nan")),
        ([0], 1 << 20, 1e9),
    ],
)
def test_bandwidth_of_nonsense(cpus: list[int], nbytes: int, seconds: float) -> None:
    with pytest.raises(NativeError, match="measuring the bandwidth of CPUs"):
        native.read_bandwidth(cpus, nbytes_per_thread=nbytes, seconds=seconds)


def test_threads_tell_their_cpus() -> None:
    found = native.thread_cpus()
    assert found[threading.get_native_id()] == tuple(sorted(os.sched_getaffinity(0)))


def test_placement_imports_neither_vllm_nor_torch_nor_ray() -> None:
    code = """
import importlib, pkgutil, sys
import placement
for module in pkgutil.walk_packages(placement.__path__, "placement."):
    if module.name != "placement.cluster.ray_cluster":
        importlib.import_module(module.name)
heavy = {"vllm", "torch", "ray", "ray_hetero", "transformers"} & set(sys.modules)
sys.exit(f"imported: {sorted(heavy)}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""Runs as the only program of a QEMU guest with known NUMA nodes; see boot_guest.py.

Every check compares `placement` with what QEMU was told or with libnuma, and prints what it saw.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import libnuma

from placement.cluster import claims
from placement.errors import ClaimError, NativeError
from placement.host import native, numa_maps, syscalls
from placement.host.sockets import sockets_of
from placement.host.sysfs import read_host

MIB = 1 << 20
SIZE = 8 * MIB
PAGES = SIZE // mmap.PAGESIZE
DISTANCES = {0: (10, 21, 14), 1: (21, 10, 24), 2: (14, 24, 10)}


class Memory:
    """Private memory of this process, touched on a chosen CPU."""

    def __init__(self) -> None:
        self.mapped = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.mapped.madvise(mmap.MADV_NOHUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapped))

    def touch(self, cpu: int | None = None) -> Memory:
        """Write to every page, on that CPU."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, before if cpu is None else {cpu})
        for page in range(PAGES):
            self.mapped[page * mmap.PAGESIZE] = 1
        os.sched_setaffinity(0, before)
        return self

    def nodes(self) -> dict[int, int]:
        """Pages by node; the compiled module, its twin, numa_maps and libnuma must agree."""
        counts = native.pages_per_node(self.address, SIZE, sample=0)
        others = {
            "ctypes": syscalls.pages_per_node(self.address, SIZE),
            "numa_maps": numa_maps.pages_per_node(self.address, SIZE),
            "libnuma": pages_by_libnuma(self.address),
        }
        for name, other in others.items():
            assert other == counts, f"{name} counts {other}, the compiled module {counts}"
        return counts


def pages_by_libnuma(address: int) -> dict[int, int]:
    """Ask numa_move_pages of libnuma where each page is."""
    from numa import LIBNUMA

    pages = (ctypes.c_void_p * PAGES)(*(address + n * mmap.PAGESIZE for n in range(PAGES)))
    status = (ctypes.c_int * PAGES)()
    nothing = ctypes.c_void_p()
    assert LIBNUMA.numa_move_pages(0, ctypes.c_ulong(PAGES), pages, nothing, status, 0) == 0
    return dict(Counter(max(node, -1) for node in status))


def topology() -> str:
    """Nodes, packages, cores, siblings and distances are those that QEMU was given."""
    host = read_host()
    seen = [(n.id, n.package, [c.cpus for c in n.cores]) for n in host.numa_nodes]
    assert seen == [(0, 0, [(0, 1), (2, 3)]), (1, 1, [(4, 5), (6, 7)]), (2, None, [])], seen
    assert {n.id: n.distances for n in host.numa_nodes} == DISTANCES
    sizes = [(n.memory_bytes or 0) / MIB for n in host.numa_nodes]
    # The kernel keeps its image and page tables out of what it counts.
    assert 600 < sizes[0] <= 768, sizes
    assert 700 < sizes[1] <= 768, sizes
    assert 200 < sizes[2] <= 256, sizes
    assert host.name == "guest"
    assert host.memory_limit_bytes is None
    return f"{seen}, MiB {[round(size) for size in sizes]}"


def same_as_libnuma() -> str:
    """Libnuma tells the same nodes, CPUs, memory and distances."""
    host = read_host()
    theirs = libnuma.numa_nodes(host)
    assert theirs is not None, "libnuma was not found"
    assert libnuma.cross_check(host) == (), libnuma.cross_check(host)
    return f"{len(theirs)} nodes, {sum(len(node.cores) for node in theirs)} cores"


def sockets() -> str:
    """Two sockets; the memory-only node is none."""
    found = [(s.package, s.numa_nodes, s.cpus) for s in sockets_of(read_host())]
    assert found == [(0, (0,), (0, 2)), (1, (1,), (4, 6))], found
    return str(found)


def first_touch() -> str:
    """A page is on the node of the CPU that touched it."""
    counts = [Memory().touch(cpu).nodes() for cpu in (0, 6)]
    assert counts == [{0: PAGES}, {1: PAGES}], counts
    assert Memory().nodes() == {-1: PAGES}
    return str(counts)


def migration() -> str:
    """bind_range moves touched pages, also to the memory-only node, unless told not to."""
    memory = Memory().touch(cpu=0)
    seen = [memory.nodes()]
    native.bind_range(memory.address, SIZE, [1], move=False)
    seen.append(memory.nodes())
    native.bind_range(memory.address, SIZE, [1])
    seen.append(memory.nodes())
    syscalls.bind_range(memory.address, SIZE, [2])
    seen.append(memory.nodes())
    assert seen == [{0: PAGES}, {0: PAGES}, {1: PAGES}, {2: PAGES}], seen
    return str(seen)


def part_of_a_range() -> str:
    """Only the pages of the range move."""
    memory = Memory().touch(cpu=0)
    native.bind_range(memory.address + SIZE // 4, SIZE // 2, [1])
    counts = memory.nodes()
    assert counts == {0: PAGES // 2, 1: PAGES // 2}, counts
    sampled = native.pages_per_node(memory.address, SIZE, sample=100)
    assert sampled == {0: 50, 1: 50}, sampled
    return f"{counts}, sample of 100: {sampled}"


def interleaving() -> str:
    """Several nodes are taken in turn."""
    memory = Memory()
    native.bind_range(memory.address, SIZE, [0, 1])
    counts = memory.touch(cpu=0).nodes()
    assert counts == {0: PAGES // 2, 1: PAGES // 2}, counts
    return str(counts)


def thread_policy() -> str:
    """set_membind decides where new memory goes, and libnuma sees the same policy."""
    from numa import memory as numa_memory

    native.set_membind([1])
    assert numa_memory.get_membind_nodes() == [1]
    bound = Memory().touch(cpu=0).nodes()
    native.set_membind([0, 1])
    spread = Memory().touch(cpu=0).nodes()
    native.set_membind([])
    default = Memory().touch(cpu=0).nodes()
    assert (bound, default) == ({1: PAGES}, {0: PAGES}), (bound, default)
    assert spread == {0: PAGES // 2, 1: PAGES // 2}, spread
    return f"[1]: {bound}, [0, 1]: {spread}, []: {default}"


def missing_node() -> str:
    """A node that is not there is an error with the reason."""
    try:
        native.bind_range(Memory().address, SIZE, [3])
    except NativeError as error:
        message = str(error)
    else:
        raise AssertionError("node 3 was accepted")
    assert "not online" in message, message
    return message


def probe_memory() -> str:
    """The bandwidth probe reads memory of the node whose CPUs it is given."""
    rates: list[float] = []
    probe = threading.Thread(
        target=lambda: rates.append(
            native.read_bandwidth([4, 6], nbytes_per_thread=24 * MIB, seconds=3.0)
        )
    )
    probe.start()
    time.sleep(2.5)
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    probe.join()
    pages = [dict(re.findall(r"\bN(\d+)=(\d+)", line)) for line in lines]
    large = [nodes for nodes in pages if sum(map(int, nodes.values())) >= 20 * MIB // 4096]
    assert large, "no mapping of that size was seen"
    assert all(set(nodes) == {"1"} for nodes in large), large
    assert rates[0] > 0
    return f"pages by node {large}, {rates[0] / 1e9:.2f} GB/s emulated"


HOLD = """
import sys, time
from placement.cluster.claims import claim_socket
from placement.host.sockets import sockets_of
from placement.host.sysfs import read_host
keep = claim_socket(sockets_of(read_host())[int(sys.argv[1])], "engine-a")
print("held", flush=True)
time.sleep(600)
"""


def claims_of_processes() -> str:
    """A held socket is refused with the holder's pid, and free when it is killed."""
    first, second = sockets_of(read_host())
    holder = subprocess.Popen([sys.executable, "-c", HOLD, "0"], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    try:
        claims.claim_socket(first, "engine-b")
    except ClaimError as error:
        message = str(error)
    else:
        raise AssertionError("socket 0 was given twice")
    assert f"pid {holder.pid} (" in message, message
    claims.claim_socket(second, "engine-b").release()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    claims.claim_socket(first, "engine-b").release()
    return message


LIMITED = """
import libnuma
from placement.host.sockets import sockets_of
from placement.host.sysfs import read_host
host = read_host()
print([[core.cpus for core in node.cores] for node in host.numa_nodes],
      [bool(node.memory_bytes) for node in host.numa_nodes],
      host.memory_limit_bytes, host.cpu_limit, len(sockets_of(host)), libnuma.cross_check(host))
"""


def inside_a_control_group() -> str:
    """Cpuset and limits of nested control groups hold for the process in them."""
    outer = Path("/sys/fs/cgroup/outer")
    (outer / "inner").mkdir(parents=True)
    Path("/sys/fs/cgroup/cgroup.subtree_control").write_text("+cpuset +memory +cpu")
    (outer / "cgroup.subtree_control").write_text("+cpuset +memory +cpu")
    (outer / "memory.max").write_text("300M")
    (outer / "inner" / "cpuset.cpus").write_text("4-5,7")
    (outer / "inner" / "cpuset.mems").write_text("1")
    (outer / "inner" / "cpu.max").write_text("150000 100000")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        preexec_fn=lambda: (outer / "inner" / "cgroup.procs").write_text(str(os.getpid())),
        capture_output=True,
        text=True,
        check=True,
    )
    expected = f"[[], [(4, 5), (7,)], []] [False, True, False] {300 * MIB} 1.5 1 ()"
    assert done.stdout.strip() == expected, done.stdout
    return done.stdout.strip()


def offline_cpu() -> str:
    """A CPU taken offline is gone from its core and named."""
    switch = Path("/sys/devices/system/cpu/cpu7/online")
    switch.write_text("0")
    host = read_host()
    switch.write_text("1")
    seen = host.offline_cpus, [core.cpus for core in host.numa_nodes[1].cores]
    assert seen == ((7,), [(4, 5), (6,)]), seen
    assert read_host().offline_cpus == ()
    return str(seen)


CHECKS: tuple[Callable[[], str], ...] = (
    topology,
    same_as_libnuma,
    sockets,
    first_touch,
    migration,
    part_of_a_range,
    interleaving,
    thread_policy,
    missing_node,
    probe_memory,
    claims_of_processes,
    inside_a_control_group,
    offline_cpu,
)


def main() -> None:
    """Run every check, also after one that failed."""
    kernel = os.uname()
    print(f"\nLinux {kernel.release}, {os.cpu_count()} CPUs, Python {sys.version.split()[0]}")
    failed = 0
    for check in CHECKS:
        try:
            seen = check()
        except Exception:  # noqa: BLE001 -- the last program of the machine reports everything
            failed += 1
            print(f"FAILED  {check.__name__}: {check.__doc__}", flush=True)
            traceback.print_exc(file=sys.stdout)
        else:
            print(f"ok  {check.__name__}: {check.__doc__}\n      {seen}", flush=True)
    print(f"{failed} checks failed" if failed else f"all {len(CHECKS)} checks passed", flush=True)


if __name__ == "__main__":
    main()

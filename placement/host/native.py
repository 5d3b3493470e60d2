"""Places of pages, where they should be, and how fast a socket reads its memory.

The functions about pages work with and without the compiled module (`placement._native`, built
from csrc/ where there was a compiler); the bandwidth probe needs it.
"""

from __future__ import annotations

import errno
import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from placement.errors import NativeError, TopologyError
from placement.host import numa_maps, syscalls
from placement.host.cpulist import parse_cpulist

try:
    _native: ModuleType | None = importlib.import_module("placement._native")
except ImportError:
    _native = None

DEFAULT_SAMPLE = 1 << 16
"""Pages that are looked at by default: 0.2 % exact on a share, a few milliseconds."""
DEFAULT_PROBE_BYTES = 128 << 20
"""Bytes that each thread reads; together well above the last-level caches of today's sockets."""
REASONS = {
    errno.EPERM: (
        "the container's seccomp profile forbids it; give the container the capability "
        "(docker run --cap-add SYS_NICE, in Kubernetes securityContext.capabilities.add)"
    ),
    errno.EINVAL: "a node or CPU is not online or not in this process's cpuset",
    errno.ENOSYS: "this kernel was built without NUMA support",
    errno.ENOMEM: "not enough free memory on the node",
    errno.EFAULT: "a part of the address range is not mapped",
    errno.EIO: "some pages could not be moved",
}


def is_compiled() -> bool:
    """Whether the compiled module is there; without it only `read_bandwidth` is missing."""
    return _native is not None


def bind_range(
    address: int,
    nbytes: int,
    nodes: Sequence[int],
    *,
    move: bool = True,
    interleave: bool | None = None,
) -> None:
    """Bind the pages of an address range to NUMA nodes.

    Every page that has a byte of the range is bound, so its neighbours on a shared page too.
    Pages that the kernel cannot move (pinned, shared) stay; `pages_per_node` tells.

    Args:
        address: first byte, such as `tensor.data_ptr()`.
        nbytes: length of the range; 0 does nothing.
        nodes: NUMA nodes to allocate on.
        move: move pages that are elsewhere; False binds only pages not yet touched.
        interleave: allocate new pages on the nodes in turn instead of on the nearest; default
            where there are several nodes.  Pages already on one of them stay where they are.

    Raises:
        NativeError: the kernel refuses: a node that is not there, no permission.

    """
    pages = _native or syscalls
    spread = len(nodes) > 1 if interleave is None else interleave
    try:
        pages.bind_range(address, nbytes, list(nodes), move, spread)
    except OSError as error:
        raise _refused(f"binding {nbytes} bytes to NUMA nodes {list(nodes)}", error) from error


def set_membind(nodes: Sequence[int], *, interleave: bool | None = None) -> None:
    """Allocate what this thread, and threads that it starts later, touches from now on nodes.

    Args:
        nodes: NUMA nodes; none goes back to the system's default (the nearest node).
        interleave: take the nodes in turn; default where there are several.

    Raises:
        NativeError: the kernel refuses: a node that is not there, no permission.

    """
    pages = _native or syscalls
    spread = len(nodes) > 1 if interleave is None else interleave
    try:
        pages.set_membind(list(nodes), spread)
    except OSError as error:
        raise _refused(f"allocating on NUMA nodes {list(nodes)}", error) from error


def pages_per_node(address: int, nbytes: int, *, sample: int = DEFAULT_SAMPLE) -> dict[int, int]:
    """Count the pages of an address range by NUMA node.

    Args:
        address: first byte.
        nbytes: length of the range.
        sample: look at no more than so many pages, evenly spaced; 0 is all of them.

    Returns:
        Number of pages looked at by node; -1 are those not in memory (never touched, or only read
        and so still the shared page of zeros).  Where move_pages is forbidden (a container's
        seccomp profile), counts of whole mappings from /proc/self/numa_maps.

    Raises:
        NativeError: neither way is open.

    """
    pages = _native or syscalls
    try:
        counts: dict[int, int] = pages.pages_per_node(address, nbytes, sample)
        return counts
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            raise _refused(f"counting the pages of {nbytes} bytes", error) from error
        try:
            return numa_maps.pages_per_node(address, nbytes)
        except TopologyError:
            raise _refused(f"counting the pages of {nbytes} bytes", error) from error


def read_bandwidth(
    cpus: Sequence[int], *, nbytes_per_thread: int = DEFAULT_PROBE_BYTES, seconds: float = 0.5
) -> float:
    """Bytes per second that these CPUs read together, each from memory that it touched first.

    One thread is pinned to each CPU, fills a buffer of its own (so on its NUMA node) and streams
    through it.  Loads of each width that the processor has, from one place and from several, take
    turns in short windows; the median window of the fastest of them counts.  The GIL is released.

    Args:
        cpus: logical CPUs, one per core; all must be in this process's cpuset.
        nbytes_per_thread: size of each buffer in bytes, rounded up to 4 MiB.  All of them together
            should be several times the last-level cache.
        seconds: length of the measurement, at most 600; filling the buffers comes on top.

    Raises:
        NativeError: the module was not compiled, or the kernel refuses a CPU or the memory.

    """
    if _native is None:
        raise NativeError(
            "measuring memory bandwidth needs the compiled module placement._native, which was "
            "not built: install a C++17 compiler (Debian: apt install g++) and install ray-hetero "
            "again, or give the bandwidth in the configuration"
        )
    try:
        rate: float = _native.read_bandwidth(list(cpus), nbytes_per_thread, seconds)
    except OSError as error:
        raise _refused(f"measuring the bandwidth of CPUs {list(cpus)}", error) from error
    return rate


def thread_cpus() -> dict[int, tuple[int, ...]]:
    """Logical CPUs that each thread of this process may run on, by thread id."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            status = (task / "status").read_text()
        except OSError:  # the thread ended meanwhile
            continue
        allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)$", status, re.MULTILINE)
        if allowed:
            found[int(task.name)] = parse_cpulist(allowed[1])
    return found


def _refused(what: str, error: OSError) -> NativeError:
    reason = REASONS.get(error.errno or 0)
    return NativeError(f"{what}: {error.strerror}" + (f": {reason}" if reason else ""))

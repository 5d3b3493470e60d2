"""System calls of csrc/placement/native.cpp about pages, by ctypes for hosts without a compiler."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections import Counter
from collections.abc import Iterator, Sequence

NUMBERS = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "move_pages": 279},
    "aarch64": {"mbind": 235, "set_mempolicy": 237, "move_pages": 239},
}
MPOL_DEFAULT, MPOL_BIND, MPOL_INTERLEAVE = 0, 2, 3
MPOL_MF_MOVE = 2
MAX_NODES = 1024
QUERY_BATCH = 1 << 14
PAGE_SIZE = os.sysconf("SC_PAGESIZE")


def bind_range(
    address: int, nbytes: int, nodes: Sequence[int], move: bool = True, interleave: bool = False
) -> None:
    """See `native.bind_range`; raises OSError."""
    if not nodes:
        raise OSError(errno.EINVAL, "mbind: no NUMA node given")
    first, count = _pages(address, nbytes)
    policy = MPOL_INTERLEAVE if interleave else MPOL_BIND
    mask = _mask(nodes)
    flags = MPOL_MF_MOVE if move else 0
    if count:
        _call("mbind", first, count * PAGE_SIZE, policy, mask, MAX_NODES + 1, flags)


def set_membind(nodes: Sequence[int], interleave: bool = False) -> None:
    """See `native.set_membind`; raises OSError."""
    if nodes:
        policy = MPOL_INTERLEAVE if interleave else MPOL_BIND
        _call("set_mempolicy", policy, _mask(nodes), MAX_NODES + 1)
    else:
        _call("set_mempolicy", MPOL_DEFAULT, None, 0)


def pages_per_node(address: int, nbytes: int, sample: int = 0) -> dict[int, int]:
    """See `native.pages_per_node`; raises OSError."""
    counts: Counter[int] = Counter()
    for batch in _batches(*_pages(address, nbytes), sample):
        pages = (ctypes.c_void_p * len(batch))(*batch)
        status = (ctypes.c_int * len(batch))(*([-errno.ENOENT] * len(batch)))
        _call("move_pages", 0, len(batch), pages, None, status, 0)
        counts.update(max(node, -1) for node in status)
    return dict(counts)


def _batches(first: int, count: int, sample: int) -> Iterator[list[int]]:
    """Addresses of evenly spaced pages, as many at a time as one call takes."""
    asked = min(sample, count) if sample else count
    for start in range(0, asked, QUERY_BATCH):
        picks = range(start, min(start + QUERY_BATCH, asked))
        yield [first + pick * count // asked * PAGE_SIZE for pick in picks]


def _pages(address: int, nbytes: int) -> tuple[int, int]:
    """(address of the first page, number of pages) that have a byte of the range."""
    first = address // PAGE_SIZE * PAGE_SIZE
    return first, -(-(address + nbytes - first) // PAGE_SIZE) if nbytes else 0


def _mask(nodes: Sequence[int]) -> ctypes.Array[ctypes.c_ulong]:
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (MAX_NODES // bits))()
    for node in nodes:
        if not 0 <= node < MAX_NODES:
            raise OSError(errno.EINVAL, f"no NUMA node {node}")
        mask[node // bits] |= 1 << node % bits
    return mask


def _call(name: str, *arguments: object) -> None:
    number = NUMBERS.get(platform.machine(), {}).get(name)
    if number is None:
        raise OSError(errno.ENOSYS, f"{name}: number unknown on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if libc.syscall(ctypes.c_long(number), *words) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")

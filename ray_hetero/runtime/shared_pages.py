"""Memory of the host that other processes map too, in huge pages where the system gives them.

It has no name that could stay behind, and nobody can make it smaller under the others' feet
(sealed_memory.py).  See MADV_COLLAPSE in madvise(2), which makes huge pages of shared memory
whatever /sys/kernel/mm/transparent_hugepage/shmem_enabled says.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from typing import Any

import torch

from ray_hetero.runtime import sealed_memory

HUGE = 2 << 20
"""Bytes of a huge page."""
STEP = 4 * HUGE
"""Bytes that are made huge pages at once, ahead of what is written."""
LONG_STEP = 8 * STEP
"""Bytes that are made huge pages at once where more is sure to be written.  Each time the system
waits for all cores, which takes 0.6 ms where two have nothing else to do and tens of ms where they
are busy; huge pages themselves are made at 4.5 GB/s by one thread, and two threads were no faster
there."""
_COLLAPSE = 25
"""MADV_COLLAPSE, which Python's mmap has no name for."""
_NONE, _FIXED = 0, 0x10
"""PROT_NONE, MAP_FIXED."""
_NO_RESERVE = 0x4000
_kept: dict[int, SharedPages] = {}
"""Pages that `keep` was called for, by address."""


class SharedPages:
    """Such memory in this process, mapped for as long as any tensor of it is there.

    Args:
        descriptor: of the memory; not needed any more once it is mapped.
        nbytes: of it.

    Raises:
        OSError: it cannot be mapped.

    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor = descriptor
        self.address = _mapped(descriptor, nbytes)
        content = (ctypes.c_uint8 * nbytes).from_address(self.address)
        # Not when the process ends: a thread or a GPU may still read then.
        weakref.finalize(content, _libc().munmap, self.address, nbytes).atexit = False
        self.memory = torch.frombuffer(content, dtype=torch.uint8)
        """uint8, [bytes]."""
        self.prepared_bytes = 0
        """Bytes that `prepare` has taken."""
        self.huge_bytes = 0
        """Part of `prepared_bytes` that is huge pages."""
        self._collapses = True
        self._counting = threading.Lock()

    @classmethod
    def made(cls, nbytes: int, name: str) -> SharedPages:
        """New memory, of which nothing is taken from the system yet, open as long as this is there.

        Raises:
            OSError: the system gives none.

        """
        descriptor = sealed_memory.made(own_name(name), nbytes, can_grow=True)
        try:
            pages = cls(descriptor, nbytes)
        except OSError:
            os.close(descriptor)
            raise
        weakref.finalize(pages, os.close, descriptor).atexit = False
        return pages

    @classmethod
    def received(cls, descriptor: int) -> SharedPages:
        """Memory that another process has made and sealed.

        Raises:
            RuntimeError: it is not sealed.
            OSError: it cannot be mapped.

        """
        if not sealed_memory.is_sealed(descriptor):
            raise RuntimeError("shared memory is not sealed; do all ranks run the same release?")
        return cls(descriptor, os.fstat(descriptor).st_size)

    def prepare(self, begin: int, end: int) -> None:
        """Take pages for some bytes before they are written, huge ones if the system can.

        They come from the NUMA nodes of this process.  Several threads may do so at once.

        Args:
            begin: a multiple of `STEP`.
            end: another one, or the end of the memory.

        """
        # A page of each decides which NUMA node the huge one comes from.
        self.memory.numpy()[begin:end:HUGE] = 0
        length = end - begin
        is_huge = False
        if self._collapses:
            is_huge = _libc().madvise(self.address + begin, length, _COLLAPSE) == 0
            self._collapses = self._collapses and is_huge
        with self._counting:
            self.prepared_bytes += length
            self.huge_bytes += length if is_huge else 0

    def append(self, content: bytes) -> None:
        """Add bytes behind the memory, which this process does not map, and seal all of it.

        Raises:
            OSError: the system has no room for them.

        """
        end = len(self.memory)
        os.truncate(self.descriptor, end + len(content))
        view = memoryview(content)
        while view:
            written = os.pwrite(self.descriptor, view, end)
            view, end = view[written:], end + written
        self.seal()

    def seal(self) -> None:
        """Let nobody change the size any more."""
        sealed_memory.seal(self.descriptor)

    def keep(self) -> None:
        """Be found by `kept_at` from now on."""
        _kept[self.address] = self


def own_name(name: str = "") -> str:
    """Name of memory of this process, as the maps of processes show it."""
    return f"{name}.{os.getpid()}"


def kept_memory(nbytes: int) -> torch.Tensor:
    """Zeroed memory that others may map, of which this process has taken all pages.

    Pages come from the NUMA nodes of who touches them first, and others may write here.

    Args:
        nbytes: at least so many.

    Raises:
        OSError: the system gives none.

    """
    pages = SharedPages.made(-(-max(nbytes, 1) // STEP) * STEP, "ray_hetero-kv")
    for begin in range(0, len(pages.memory), LONG_STEP):
        pages.prepare(begin, min(begin + LONG_STEP, len(pages.memory)))
    if pages.huge_bytes < pages.prepared_bytes:
        pages.memory.zero_()
    pages.seal()
    pages.keep()
    return pages.memory


def kept_at(address: int) -> SharedPages | None:
    """The memory of this process that begins at an address, if `keep` was called for it."""
    return _kept.get(address)


def _mapped(descriptor: int, nbytes: int) -> int:
    """Map memory at an address that huge pages can have."""
    libc = _libc()
    reserved = libc.mmap(
        None, nbytes + HUGE, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE,
        -1, 0,
    )  # fmt: skip
    if reserved != _FAILED:
        aligned = -(-reserved // HUGE) * HUGE
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        at = libc.mmap(aligned, nbytes, writable, mmap.MAP_SHARED | _FIXED, descriptor, 0)
        if at != _FAILED:
            return int(at)
    code = ctypes.get_errno()
    raise OSError(code, f"{os.strerror(code)}: {nbytes} bytes of shared memory cannot be mapped")


_FAILED = ctypes.c_void_p(-1).value


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    )  # fmt: skip
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc

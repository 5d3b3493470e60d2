"""Memory without a name that several processes of a host map, of a size that nobody can change.

See memfd_create(2), and fcntl(2) for its seals.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import torch

_BLOCK = 512
"""Bytes that stat(2) counts in."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals of the memory: neither its size nor its seals can be changed any more."""


def made(name: str, size: int, *, can_grow: bool = False) -> int:
    """Make memory, filled with zeros.

    Args:
        name: for those who look at the maps of a process.
        size: bytes.
        can_grow: the size can still change, until `seal`.

    Returns:
        Its descriptor.

    Raises:
        OSError: the system gives none.

    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(descriptor, size)
        if not can_grow:
            seal(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def seal(descriptor: int) -> None:
    """Keep the memory's size for good."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)


def is_sealed(descriptor: int) -> bool:
    """Whether memory has its size for good."""
    return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS


def has_size(descriptor: int, size: int) -> bool:
    """Whether memory has a size, and for good."""
    return os.fstat(descriptor).st_size == size and is_sealed(descriptor)


def written_bytes(descriptor: int, begin: int = 0) -> int:
    """Bytes of another process's memory from `begin` on, for which that one has taken room.

    Raises:
        ValueError: there are more than it has taken; who reads them would take room by a number.

    """
    status = os.fstat(descriptor)
    nbytes, there = status.st_size - begin, status.st_blocks * _BLOCK
    if begin < 0 or not 0 <= nbytes <= there:
        raise ValueError(
            f"memory of {status.st_size} bytes, of which {there} are there, read from byte {begin}"
        )
    return nbytes


def mapped(descriptor: int, size: int) -> torch.Tensor:
    """Map memory, whose descriptor is not needed any more then.

    Returns:
        uint8, [size].

    Raises:
        OSError: it cannot be mapped.

    """
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)

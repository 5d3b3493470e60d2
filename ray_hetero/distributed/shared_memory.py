"""Memory without a name that several processes of a host map, and the sockets that hand it over.

See memfd_create(2) and fcntl(2) for sealed memory, unix(7) for abstract addresses and for passing
descriptors.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import uuid

import torch

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""What cannot be done any more to the memory: changing its size, or its seals."""
NOTE = b"\0"
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as SO_PEERCRED answers."""


def made(name: str, size: int) -> int:
    """Make memory of a size that nobody can change, filled with zeros.

    Args:
        name: for those who look at the maps of a process.
        size: bytes.

    Returns:
        Its descriptor.

    Raises:
        OSError: the system gives none.

    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_sealed(descriptor: int, size: int) -> bool:
    """Whether memory has a size for good."""
    found = os.fstat(descriptor).st_size
    return found == size and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS


def mapped(descriptor: int, size: int) -> torch.Tensor:
    """Map memory, whose descriptor is not needed any more then.

    Returns:
        uint8, [size].

    Raises:
        OSError: it cannot be mapped.

    """
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


def unix_socket(timeout_s: float) -> socket.socket:
    """A Unix socket of messages, with a limit for each of its calls."""
    new = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    new.settimeout(timeout_s)
    return new


def bind_abstract(listener: socket.socket, backlog: int = 1) -> bytes:
    """Listen at an abstract address, which ends with the socket.

    Returns:
        The address without its leading zero; of another network namespace no socket has it.

    """
    listener.bind(f"\0ray_hetero-{uuid.uuid4()}")
    listener.listen(backlog)
    address: bytes = listener.getsockname()
    return address[1:]


def user_of(connection: socket.socket) -> int:
    """The user whose process is at the other end."""
    answer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(answer)[1]
    return user


def accepted(listener: socket.socket) -> socket.socket:
    """The next connection of a process of this user; others are closed."""
    while True:
        end = listener.accept()[0]
        if user_of(end) == os.getuid():
            return end
        end.close()

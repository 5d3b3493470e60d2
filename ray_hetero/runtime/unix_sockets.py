"""Sockets over which processes of a host hand memory without a name to each other.

See unix(7) for abstract addresses and for passing descriptors; the memory is that of
runtime/sealed_memory.py.
"""

from __future__ import annotations

import os
import socket
import struct
import uuid

NOTE = b"\0"
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as SO_PEERCRED answers."""


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

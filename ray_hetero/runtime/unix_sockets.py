"""Sockets over which processes of a host hand memory without a name to each other.

See unix(7) for abstract addresses and for passing descriptors; the memory is that of
runtime/sealed_memory.py.
"""

from __future__ import annotations

import os
import socket
import struct
import time
import uuid

from placement.given import shown

NOTE = b"\0"
MALFORMED = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
    struct.error,
)  # fmt: skip
"""Errors of Python where a message has another form."""
BACKLOG = 128
"""Connections that may wait to be accepted.  Processes of other users can connect too: few of them
must not fill what the one has that is waited for."""
RETRY_SECONDS = 0.01
"""Interval between two tries to connect to a listener whose backlog is full, in seconds."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as SO_PEERCRED answers."""


def unix_socket(timeout_s: float) -> socket.socket:
    """A Unix socket of messages, with a limit for each of its calls."""
    new = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    new.settimeout(timeout_s)
    return new


def bind_abstract(listener: socket.socket) -> bytes:
    """Listen at an abstract address, which ends with the socket.

    Returns:
        The address without its leading zero; of another network namespace no socket has it.

    """
    listener.bind(f"\0ray_hetero-{uuid.uuid4()}")
    listener.listen(BACKLOG)
    address: bytes = listener.getsockname()
    return address[1:]


def unlike(error: Exception) -> str:
    """Sentence without its subject about a process whose message has led to a `MALFORMED` error."""
    return (
        f"has sent something else than was expected ({type(error).__name__}: {shown(str(error))}); "
        "do all ranks run the same release?"
    )


def user_of(connection: socket.socket) -> int:
    """The user whose process is at the other end."""
    answer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(answer)[1]
    return user


def connect(connection: socket.socket, name: bytes) -> None:
    """Connect to an abstract address, within the socket's limit.

    Args:
        connection: a socket with a limit, of which every try takes what is left.
        name: the address without its leading zero.

    Raises:
        TimeoutError: the listener's backlog has been full all the time.
        OSError: nobody listens there.

    """
    limit_s = connection.gettimeout()
    assert limit_s is not None, "waits have a limit"
    deadline = time.monotonic() + limit_s
    while True:
        try:
            connection.connect(b"\0" + name)
            return
        except BlockingIOError:
            # The system does not wait for room.
            if time.monotonic() > deadline:
                raise TimeoutError(f"too many connections wait there, for {limit_s:g} s") from None
            time.sleep(RETRY_SECONDS)


def accepted(listener: socket.socket) -> socket.socket:
    """The next connection of a process of this user; others are closed.

    Raises:
        TimeoutError: there was none within the listener's limit, whoever else has connected.

    """
    limit_s = listener.gettimeout()
    deadline = None if limit_s is None else time.monotonic() + limit_s
    try:
        while True:
            end = listener.accept()[0]
            if user_of(end) == os.getuid():
                return end
            end.close()
            if deadline is not None:
                # Zero would stand for no wait at all, which fails otherwise.
                listener.settimeout(max(1e-3, deadline - time.monotonic()))
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no process of this user has connected in {limit_s:g} s")
    finally:
        listener.settimeout(limit_s)

"""Messages between two stages of one host: memory that both of them map.

The sender makes the memory and hands it over through a Unix socket, so that it has no name that
could stay behind, and no limit of /dev/shm.  From then on a byte on the socket says that the next
message is complete, and one the other way that the oldest may be written again.  Of a process that
ends, the system closes the socket, which ends the other's wait.

See memfd_create(2) and unix(7), for abstract addresses and for passing descriptors.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from ray_hetero.distributed.messages import Message, OnItsWay, Packing

NOTE = b"\0"
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as SO_PEERCRED answers."""


class SharedMessages:
    """Messages in memory without a name, in the process that has made it or got it.

    Args:
        descriptor: of the memory; not needed any more once it is mapped.
        packing: how the tensors lie in a row.
        capacity: most tokens of a message.
        number: of messages.

    Raises:
        OSError: it cannot be mapped.

    """

    def __init__(self, descriptor: int, packing: Packing, capacity: int, number: int) -> None:
        each = packing.message_bytes(capacity)
        self.memory = torch.frombuffer(mmap.mmap(descriptor, number * each), dtype=torch.uint8)
        """uint8, [bytes of all messages]."""
        self.messages = [Message(packing, part) for part in self.memory.split(each)]


class Offer:
    """What a sender has ready for the next stage.

    Args:
        packing: how the tensors lie in a row.
        capacity: most tokens of a message.
        number: of messages.
        timeout_s: longest wait for the other stage, now and later.

    Raises:
        OSError: the system gives no such memory, or no such socket.

    """

    def __init__(self, packing: Packing, capacity: int, number: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        with ExitStack() as stack:
            self._descriptor = os.memfd_create("ray_hetero-messages")
            stack.callback(os.close, self._descriptor)
            os.truncate(self._descriptor, number * packing.message_bytes(capacity))
            self.shared = SharedMessages(self._descriptor, packing, capacity, number)
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(self._listener)
            self._listener.settimeout(timeout_s)
            # Abstract, so it ends with the socket; of another network namespace, where the stage
            # is looked for in vain, no other socket has it.
            self._listener.bind(f"\0ray_hetero-{uuid.uuid4()}")
            self._listener.listen()
            self._open = stack.pop_all()

    @property
    def address(self) -> bytes:
        """Where the next stage finds it, in this network namespace."""
        address: bytes = self._listener.getsockname()
        return address

    def accept(self) -> socket.socket:
        """Hand the memory over to the stage that has connected, a process of this user.

        Returns:
            The connection to it.

        Raises:
            RuntimeError: it is late, or has ended.

        """
        try:
            connection = self._listener.accept()[0]
            while _user_of(connection) != os.getuid():
                connection.close()
                connection = self._listener.accept()[0]
            connection.settimeout(self._timeout_s)
            socket.send_fds(connection, [NOTE], [self._descriptor])
        except OSError as error:
            raise _failed(error) from None
        finally:
            self.withdraw()
        return connection

    def withdraw(self) -> None:
        """Close what only a stage that has not connected yet would need."""
        self._open.close()


def _user_of(connection: socket.socket) -> int:
    answer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(answer)[1]
    return user


def connected(address: bytes, timeout_s: float) -> socket.socket | None:
    """A connection to an offer; None where it cannot be reached, as from another container."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(timeout_s)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        return None
    return connection


def take(connection: socket.socket, packing: Packing, capacity: int, number: int) -> SharedMessages:
    """Take the memory that the sender hands over.

    Raises:
        RuntimeError: it is late, or has ended.

    """
    try:
        note, descriptors, _, _ = socket.recv_fds(connection, len(NOTE), 1)
    except OSError as error:
        raise _failed(error) from None
    if not note:
        raise _failed(None)
    try:
        return SharedMessages(descriptors[0], packing, capacity, number)
    finally:
        os.close(descriptors[0])


class SharedMemorySender:
    """The end of the stage that sends."""

    def __init__(self, messages: Sequence[Message], connection: socket.socket) -> None:
        self._messages = messages
        self._connection = connection
        self._begun = 0

    def begin(self) -> None:
        """Wait until the receiver has taken the memory.

        Raises:
            RuntimeError: it is late, or has ended.

        """
        _hear(self._connection)

    def next_message(self) -> Message:
        """The next message to fill, once the receiver does not need it any more."""
        message = self._messages[self._begun % len(self._messages)]
        if self._begun >= len(self._messages):
            _hear(self._connection)
        self._begun += 1
        return message

    def send(self, message: Message, tokens: int) -> OnItsWay:
        """Say that a message is complete; they are in the order of `next_message`."""
        _tell(self._connection)
        return There()


class There:
    """A message that needs no time on its way."""

    def is_completed(self) -> bool:
        """Whether it is there."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


class SharedMemoryReceiver:
    """The end of the stage that receives.

    Args:
        messages: in the sender's order.
        connection: to the sender.
        wait_until_read: waits until what came in a message is not needed any more.

    """

    def __init__(
        self,
        messages: Sequence[Message],
        connection: socket.socket,
        wait_until_read: Callable[[Message], None],
    ) -> None:
        self._messages = messages
        self._connection = connection
        self._wait_until_read = wait_until_read
        self._begun = 0

    def begin(self) -> None:
        """Tell the sender that the memory may be used."""
        _tell(self._connection)

    def receive(self, tokens: int) -> tuple[Message, Arrival]:
        """Begin to receive a message; it is there once the arrival has been waited for."""
        number = len(self._messages)
        message = self._messages[self._begun % number]
        self._begun += 1
        if self._begun >= number:
            oldest = self._messages[self._begun % number]
            self._wait_until_read(oldest)
            _tell(self._connection)
        return message, Arrival(self._connection)


class Arrival:
    """The next message from the sender."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def wait(self) -> None:
        """Wait for it.

        Raises:
            RuntimeError: the sender is late, or has ended.

        """
        _hear(self._connection)


def _tell(connection: socket.socket) -> None:
    try:
        connection.send(NOTE)
    except OSError as error:
        raise _failed(error) from None


def _hear(connection: socket.socket) -> None:
    try:
        note = connection.recv(len(NOTE))
    except OSError as error:
        raise _failed(error) from None
    if not note:
        raise _failed(None)


def _failed(error: OSError | None) -> RuntimeError:
    if isinstance(error, TimeoutError):
        return RuntimeError("the stage at the other end is late (exchange.timeout_s)")
    return RuntimeError(f"the stage at the other end has closed the connection ({error or 'end'})")

"""Messages between two ranks of one host: memory that both of them map.

The sender makes the memory and hands it over through a Unix socket, so that it has no name that
could stay behind, and no limit of /dev/shm.  From then on a byte on the socket says that the next
message is complete, and one the other way that the oldest may be written again.  Of a process that
ends, the system closes the socket, which ends the other's wait.

The memory is sealed: nobody can make it smaller under the other's feet, who would end by SIGBUS.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack

from placement.errors import NativeError
from placement.host import native
from placement.host.sysfs import machine_id
from ray_hetero.distributed.link import Terms, WaitUntilRead
from ray_hetero.distributed.messages import Message, OnItsWay, There
from ray_hetero.distributed.neighbour import Neighbour
from ray_hetero.log import logger
from ray_hetero.runtime import sealed_memory, unix_sockets
from ray_hetero.runtime.gpu_memory import lock_pages
from ray_hetero.runtime.unix_sockets import NOTE


class SharedMemoryLink:
    """The link of two ranks that can map the same memory: of one host and one user."""

    name = "shared memory"
    is_one_memory = True

    def offer(self, terms: Terms, neighbour: Neighbour) -> SharedMemoryOffer | None:
        """Make the memory; None where the system gives none."""
        try:
            return SharedMemoryOffer(terms, neighbour.rank)
        except OSError as error:
            logger.warning("stage boundary: no memory can be shared: %s", error)
            return None

    def reach(
        self, address: bytes, terms: Terms, neighbour: Neighbour
    ) -> SharedMemoryReached | None:
        """Connect to an offer; None where it cannot be reached, as from another container."""
        machine, _, name = address.partition(b"\0")
        if not machine or machine != machine_id().encode():
            return None
        connection = Connection(unix_sockets.unix_socket(terms.timeout_s), neighbour.rank)
        try:
            unix_sockets.connect(connection.socket, name)
        except OSError as error:
            connection.socket.close()
            # As from another container of the same machine, or with strangers in the way.
            logger.warning(
                "stage boundary: the memory of rank %d, on this machine, is out of reach (%s); "
                "messages go through the network", neighbour.rank, error,
            )  # fmt: skip
            return None
        return SharedMemoryReached(connection, terms)


class Connection:
    """A rank's end of the Unix socket to a neighbour; errors name the neighbour and the limit.

    Args:
        end: the socket, with its limit set.
        rank: the neighbour's.

    """

    def __init__(self, end: socket.socket, rank: int) -> None:
        self.socket = end
        self._rank = rank

    def tell(self) -> None:
        """Send a note.

        Raises:
            RuntimeError: the neighbour has ended, or takes no note in time.

        """
        try:
            self.socket.send(NOTE)
        except OSError as error:
            raise self.failed(error) from None

    def hear(self) -> None:
        """Wait for a note.

        Raises:
            RuntimeError: the neighbour is late, or has ended.

        """
        try:
            note = self.socket.recv(len(NOTE))
        except OSError as error:
            raise self.failed(error) from None
        if not note:
            raise self.failed(None)

    def failed(self, error: OSError | None) -> RuntimeError:
        """Exception for an error of the socket; None stands for its end."""
        who = f"rank {self._rank}, at the other end of the stage boundary,"
        if isinstance(error, TimeoutError):
            limit_s = self.socket.gettimeout()
            return RuntimeError(f"{who} was not there in {limit_s:g} s (exchange.timeout_s)")
        return RuntimeError(f"{who} has closed the connection ({error or 'end'})")


class SharedMessages:
    """Messages in memory without a name, in the process that has made it or got it.

    Args:
        descriptor: of the memory; not needed any more once it is mapped.
        terms: how many messages there are, and how large.

    Raises:
        RuntimeError: the memory has another size than the messages need.
        OSError: it cannot be mapped.

    """

    def __init__(self, descriptor: int, terms: Terms) -> None:
        each, number = terms.packing.message_bytes(terms.capacity), _number(terms)
        expected = _total_bytes(terms)
        if not sealed_memory.has_size(descriptor, expected):
            found = os.fstat(descriptor).st_size
            raise RuntimeError(
                f"the shared memory of a stage boundary has {found} bytes, expected {expected} "
                f"({number} messages of {each} bytes), sealed; do all ranks run the same release?"
            )
        self.memory = sealed_memory.mapped(descriptor, expected)
        """uint8, [bytes of all messages]."""
        self.messages = [Message(terms.packing, part) for part in self.memory.split(each)]

    def lock(self) -> None:
        """Lock the pages for the copies of a GPU."""
        lock_pages(self.memory)

    def bind(self, numa_nodes: Sequence[int]) -> None:
        """Let the pages come from these NUMA nodes, before anybody has touched them."""
        try:
            native.bind_range(self.memory.data_ptr(), self.memory.nbytes, numa_nodes, move=False)
        except NativeError as error:
            logger.warning("stage boundary: messages may lie on another NUMA node: %s", error)


def _number(terms: Terms) -> int:
    # One message more than batches in flight, so that packing need not wait; and one more, as a
    # receiver gives the oldest back when it has begun with the newest.
    return terms.in_flight + 2


def _total_bytes(terms: Terms) -> int:
    return _number(terms) * terms.packing.message_bytes(terms.capacity)


class SharedMemoryOffer:
    """Memory and a listening socket, ready for one rank of the next stage.

    Args:
        terms: of the link.
        rank: the receiver's.

    Raises:
        OSError: the system gives no such memory, or no such socket.

    """

    def __init__(self, terms: Terms, rank: int) -> None:
        self._terms = terms
        self._rank = rank
        with ExitStack() as stack:
            self._descriptor = sealed_memory.made("ray_hetero-messages", _total_bytes(terms))
            stack.callback(os.close, self._descriptor)
            self._shared = SharedMessages(self._descriptor, terms)
            self._listener = unix_sockets.unix_socket(terms.timeout_s)
            stack.enter_context(self._listener)
            self._name = unix_sockets.bind_abstract(self._listener)
            self._open = stack.pop_all()

    @property
    def address(self) -> bytes:
        """This machine's identity, and the socket's name in its network namespace."""
        return machine_id().encode() + b"\0" + self._name

    def accept(self) -> SharedMemorySender:
        """Hand the memory over to the rank that has connected, a process of this user.

        Raises:
            RuntimeError: it is late, or has ended.

        """
        connection = Connection(self._listener, self._rank)
        try:
            end = unix_sockets.accepted(self._listener)
            end.settimeout(self._terms.timeout_s)
            socket.send_fds(end, [NOTE], [self._descriptor])
            connection = Connection(end, self._rank)
        except OSError as error:
            raise connection.failed(error) from None
        finally:
            self.withdraw()
        # The receiver binds the memory before anybody touches a page of it.
        connection.hear()
        if self._terms.is_on_gpu:
            self._shared.lock()
        return SharedMemorySender(self._shared.messages, connection)

    def withdraw(self) -> None:
        """Close what only a rank that has not connected yet would need."""
        self._open.close()


class SharedMemoryReached:
    """A connection to an offer, whose memory has not been taken yet."""

    def __init__(self, connection: Connection, terms: Terms) -> None:
        self._connection = connection
        self._terms = terms

    def take(self, wait_until_read: WaitUntilRead) -> SharedMemoryReceiver:
        """Take the memory that the sender hands over.

        Raises:
            RuntimeError: the sender is late, or has ended, or its memory has another size.

        """
        shared = self._taken()
        if self._terms.numa_nodes:
            shared.bind(self._terms.numa_nodes)
        if self._terms.is_on_gpu:
            shared.lock()
        receiver = SharedMemoryReceiver(shared.messages, self._connection, wait_until_read)
        self._connection.tell()
        return receiver

    def _taken(self) -> SharedMessages:
        try:
            note, descriptors, _, _ = socket.recv_fds(self._connection.socket, len(NOTE), 1)
        except OSError as error:
            raise self._connection.failed(error) from None
        if not (note and descriptors):
            raise self._connection.failed(None)
        try:
            return SharedMessages(descriptors[0], self._terms)
        finally:
            os.close(descriptors[0])


class SharedMemorySender:
    """The sending end of a link through shared memory.

    Args:
        messages: in the order in which they are filled.
        connection: to the receiver.

    """

    def __init__(self, messages: Sequence[Message], connection: Connection) -> None:
        self._messages = messages
        self._connection = connection
        self._begun = 0

    def next_message(self) -> Message:
        """The next message to fill, once the receiver does not need it any more."""
        message = self._messages[self._begun % len(self._messages)]
        if self._begun >= len(self._messages):
            self._connection.hear()
        self._begun += 1
        message.begin()
        return message

    def send(self, message: Message, tokens: int) -> OnItsWay:
        """Say that a message is complete; they are in the order of `next_message`."""
        message.complete()
        self._connection.tell()
        return There()


class SharedMemoryReceiver:
    """The receiving end of a link through shared memory.

    Args:
        messages: in the sender's order.
        connection: to the sender.
        wait_until_read: waits until what came in a message is not needed any more.

    """

    def __init__(
        self, messages: Sequence[Message], connection: Connection, wait_until_read: WaitUntilRead
    ) -> None:
        self._messages = messages
        self.first = messages[0]
        """First message, which nobody has filled yet."""
        self._connection = connection
        self._wait_until_read = wait_until_read
        self._begun = 0

    def receive(self, tokens: int) -> tuple[Message, Arrival]:
        """Begin to receive a message; it is there once the arrival has been waited for."""
        number = len(self._messages)
        message = self._messages[self._begun % number]
        self._begun += 1
        message.begin()
        if self._begun >= number:
            oldest = self._messages[self._begun % number]
            self._wait_until_read(oldest)
            self._connection.tell()
        return message, Arrival(self._connection)


class Arrival:
    """The next message from the sender, on its way."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def wait(self) -> None:
        """Wait for the message; once only.

        Raises:
            RuntimeError: the sender is late, or has ended.

        """
        self._connection.hear()

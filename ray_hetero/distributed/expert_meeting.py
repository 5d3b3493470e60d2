"""How a rank of a stage and the expert ranks of its host find each other.

The rank of the stage listens on a Unix socket with an abstract name, which ends with the socket;
once its model is loaded it hands its memory over to each expert rank that connects.  From then on
the connection says nothing but that the other end is still there: of a process that ends, the
system closes it.  The other ranks of a stage, which only read experts, listen in the same way and
get an offer to read (expert_offers.py).  See unix(7) for abstract addresses and for passing
descriptors.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from placement.given import shown
from ray_hetero.distributed.expert_memory import Geometry, HandoverMemory, RemoteLayer
from ray_hetero.errors import AgreementError, StartupError
from ray_hetero.runtime.unix_sockets import MALFORMED, NOTE, accepted, unix_socket, unlike, user_of

POLL_SECONDS = 0.05
"""Interval at which an expert rank looks whether somebody listens already, in seconds."""
MOST_BYTES = 1 << 20
"""Most bytes of one message between a rank of the stages and an expert rank."""
LIMIT = "startup.load_timeout_s"
"""Name of the setting that limits these waits."""


def address_of(meeting: str, stage: int, rank: int = 0) -> bytes:
    """The address of a rank of a stage, of which the first one hands tokens over.

    Args:
        meeting: a name that no other engine has.
        stage: number of the stage.
        rank: its number in the stage.

    """
    return f"\0ray_hetero-experts-{meeting}-{stage}-{rank}".encode()


@dataclass(frozen=True)
class Reached:
    """A channel as an expert rank has got it."""

    memory: HandoverMemory
    layers: tuple[RemoteLayer, ...]
    connection: socket.socket


class ExpertMeeting:
    """The listening end, in the rank of a stage.

    Args:
        meeting: a name that no other engine has.
        stage: number of the stage.
        rank: number of the rank in its stage.

    Raises:
        OSError: the system gives no such socket.

    """

    def __init__(self, meeting: str, stage: int, rank: int = 0) -> None:
        self._listener = unix_socket(0)
        self._listener.bind(address_of(meeting, stage, rank))
        self._listener.listen()

    def accept(
        self,
        geometry: Geometry,
        layers: Sequence[RemoteLayer],
        names: Sequence[str],
        limit_s: float,
    ) -> tuple[HandoverMemory, list[socket.socket]]:
        """Hand memory over to all expert ranks, which are processes of this user.

        Args:
            geometry: of the memory.
            layers: in the order of their numbers.
            names: what people call the expert ranks, by number.
            limit_s: longest wait for all, in seconds.

        Returns:
            The memory, and the connections by number of the expert rank.

        Raises:
            StartupError: one is late, or has ended.
            AgreementError: one has no number of an expert rank, or another's.
            OSError: the system gives no memory.

        """
        deadline = time.monotonic() + limit_s
        descriptor = HandoverMemory.made(geometry)
        try:
            memory = HandoverMemory(descriptor, geometry)
            found: dict[int, socket.socket] = {}
            for number, connection in self._arrivals(names, deadline, limit_s):
                found[number] = connection
                told = asdict(geometry) | {
                    "dtype": str(geometry.dtype).removeprefix("torch."),
                    "layers": [asdict(layer) for layer in layers],
                }
                with naming(names[number], limit_s):
                    socket.send_fds(connection, [json.dumps(told).encode()], [descriptor])
            for number, connection in found.items():
                with naming(names[number], limit_s):
                    connection.settimeout(max(0.01, deadline - time.monotonic()))
                    if not connection.recv(len(NOTE)):
                        raise ConnectionResetError("end")
                connection.settimeout(None)
        finally:
            os.close(descriptor)
            self._listener.close()
        return memory, [found[number] for number in range(len(names))]

    def accept_offers(self, names: Sequence[str], limit_s: float) -> list[socket.socket]:
        """Wait for all expert ranks, in a rank that only reads experts.

        Args:
            names: what people call the expert ranks, by number.
            limit_s: longest wait for all, in seconds.

        Returns:
            The connections by number of the expert rank.

        Raises:
            StartupError: one is late, or has ended.
            AgreementError: one has no number of an expert rank, or another's.

        """
        deadline = time.monotonic() + limit_s
        try:
            found = dict(self._arrivals(names, deadline, limit_s))
        finally:
            self._listener.close()
        return [found[number] for number in range(len(names))]

    def _arrivals(
        self, names: Sequence[str], deadline: float, limit_s: float
    ) -> Iterator[tuple[int, socket.socket]]:
        """Each expert rank of this user that connects: its number, and the connection."""
        missing = dict(enumerate(names))
        while missing:
            with naming(" and ".join(missing.values()), limit_s):
                self._listener.settimeout(max(0.01, deadline - time.monotonic()))
                connection = accepted(self._listener)
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                if not (said := connection.recv(MOST_BYTES)):
                    raise ConnectionResetError("end")
                if (number := int(said)) not in missing:
                    raise ValueError(f"expected one of the numbers {list(missing)}, got {number}")
            del missing[number]
            yield number, connection


@contextmanager
def naming(who: str, limit_s: float) -> Iterator[None]:
    """Errors of a socket, told of the rank at its other end."""
    try:
        yield
    except TimeoutError:
        raise StartupError(f"{who} did not connect in {limit_s:g} s ({LIMIT})") from None
    except OSError as error:
        raise StartupError(f"{who} has closed the connection ({error})") from None
    except MALFORMED as error:
        raise AgreementError(f"{who} {unlike(error)}") from None


def reach(
    meeting: str, stage: int, number: int, numa_nodes: Sequence[int], limit_s: float
) -> Reached:
    """Connect to the rank of a stage, in an expert rank.

    Args:
        meeting: as for `ExpertMeeting`.
        stage: number of the stage.
        number: of this expert rank among them.
        numa_nodes: where its results are to lie; none leaves that to the system.
        limit_s: longest wait, in seconds.

    Raises:
        StartupError: that rank is late, or has ended.
        AgreementError: it tells something else than ranks of this release do.

    """
    deadline = time.monotonic() + limit_s
    who = f"the rank that hands tokens of stage {stage} over"
    connection = _connected(address_of(meeting, stage), who, number, limit_s)
    with naming(who, limit_s):
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        told, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 1)
        if not descriptors:
            raise ConnectionResetError("end")
        try:
            layers, geometry = _agreed(told, number)
            memory = HandoverMemory(descriptors[0], geometry)
        finally:
            os.close(descriptors[0])
    if numa_nodes:
        memory.bind(number, numa_nodes)
    connection.settimeout(None)
    return Reached(memory, layers, connection)


def reach_reader(meeting: str, stage: int, rank: int, number: int, limit_s: float) -> socket.socket:
    """Connect to a rank of a stage that only reads experts, in an expert rank.

    Args:
        meeting: as for `ExpertMeeting`.
        stage: number of the stage.
        rank: number of the rank in its stage.
        number: of this expert rank among them.
        limit_s: longest wait, in seconds.

    Raises:
        StartupError: that rank is late, or has ended.

    """
    who = f"rank {rank} of stage {stage}, which reads experts,"
    return _connected(address_of(meeting, stage, rank), who, number, limit_s)


def _connected(address: bytes, who: str, number: int, limit_s: float) -> socket.socket:
    """A connection to a process of this user, which was told the number of this expert rank."""
    deadline = time.monotonic() + limit_s
    connection = unix_socket(limit_s)
    while True:
        try:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            connection.connect(address)
            break
        except (ConnectionRefusedError, BlockingIOError):
            # Nobody listens yet, or too many connections wait there.
            if time.monotonic() > deadline:
                raise StartupError(f"{who} was not there in {limit_s:g} s ({LIMIT})") from None
            time.sleep(POLL_SECONDS)
    with naming(who, limit_s):
        if user_of(connection) != os.getuid():
            raise ConnectionRefusedError("a process of another user listens there")
        connection.send(str(number).encode())
    return connection


def _agreed(told: bytes, number: int) -> tuple[tuple[RemoteLayer, ...], Geometry]:
    """Layers and their memory as the rank of a stage describes them to an expert rank."""
    given = json.loads(told)
    layers = tuple(RemoteLayer(**layer) for layer in given.pop("layers"))
    dtype = getattr(torch, given["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype: {given['dtype']}")
    geometry = Geometry(**given | {"dtype": dtype})
    sizes = [geometry.ranks, geometry.capacity, geometry.hidden, geometry.chosen]
    sizes += [size for layer in layers for size in (layer.hidden, layer.chosen)]
    if not (
        all(type(size) is int and size > 0 for size in sizes)
        and geometry.ranks > number
        and all(isinstance(layer.name, str) for layer in layers)
        and all(layer.hidden <= geometry.hidden for layer in layers)
        and all(layer.chosen <= geometry.chosen for layer in layers)
    ):
        raise ValueError(f"{shown(geometry)} has no room for {shown(layers)}")
    return layers, geometry


def is_ready(reached: Reached) -> None:
    """Tell the rank of the stage that its tokens will be computed.

    Raises:
        StartupError: it has ended.

    """
    with naming("the rank that hands tokens over", 0):
        reached.connection.send(NOTE)

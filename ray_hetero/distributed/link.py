"""Interface of a link of a stage boundary; each transport between two processes has a file.

A link carries messages in one direction, from one rank of a stage to one rank of the next one.  A
rank with several receivers has a link to each of them (`neighbour.Neighbours`).  Links are tried in
the order of `links.LINKS`:

1. The sending rank makes an *offer* of every link that it can serve, and tells their addresses.
2. The receiving rank tries to reach one after the other, takes the first that it reaches, and tells
   which one that is.
3. The sending rank accepts on that link, and withdraws the other offers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ray_hetero.distributed.messages import Message, OnItsWay, Packing
from ray_hetero.distributed.neighbour import Neighbour

WaitUntilRead = Callable[[Message], None]
"""Waits until what came in a message is not needed any more."""


@dataclass(frozen=True)
class Terms:
    """Terms that both ends of a link have agreed on, and this end's device."""

    packing: Packing
    """Layout of the tensors of a token in a row."""
    capacity: int
    """Most tokens of a message."""
    in_flight: int
    """Most batches between the first and the last stage: one a stage."""
    timeout_s: float
    """Longest wait for the other end, now and in each step (exchange.timeout_s)."""
    device: torch.device
    """Device on which this end computes."""
    numa_nodes: tuple[int, ...] = ()
    """NUMA nodes of a CPU rank, which computes in the memory that it has received into."""

    @property
    def is_on_gpu(self) -> bool:
        """Whether messages are copied from, or to, the memory of a GPU."""
        return bool(self.device.type != "cpu")


class Sender(Protocol):
    """The end of a link that sends."""

    def next_message(self) -> Message:
        """The next message to fill, once there is room; what it last held may be on its way.

        Raises:
            RuntimeError: the receiver is late, or has ended.

        """

    def send(self, message: Message, tokens: int) -> OnItsWay:
        """Start sending a message with so many rows; messages go in `next_message`'s order.

        Raises:
            RuntimeError: the receiver has ended.

        """


class Receiver(Protocol):
    """The end of a link that receives."""

    @property
    def first(self) -> Message | None:
        """First message, if both ends see the same ones."""

    def receive(self, tokens: int) -> tuple[Message, OnItsWay]:
        """Start receiving a message with so many rows; it is there once it was waited for.

        Raises:
            RuntimeError: the sender has ended.

        """


class Offer(Protocol):
    """A link that a sending rank can serve; the receiving one has not chosen yet."""

    @property
    def address(self) -> bytes:
        """Address by which the receiving rank reaches the link."""

    def accept(self) -> Sender:
        """The sending end, for the receiving rank that has chosen this link.

        Raises:
            RuntimeError: that rank is late, or has ended.

        """

    def withdraw(self) -> None:
        """Give back what was held ready; after `accept` there is nothing left to give back."""


class Reached(Protocol):
    """A link that a receiving rank has reached; the sending one has not been told yet."""

    def take(self, wait_until_read: WaitUntilRead) -> Receiver:
        """The receiving end, once the sending rank was told that this link is chosen.

        Raises:
            RuntimeError: that rank is late, or has ended.

        """


class Link(Protocol):
    """A way from one rank's process to another's."""

    @property
    def name(self) -> str:
        """Name of the link, as the log and the neighbour's rank know it."""

    @property
    def is_one_memory(self) -> bool:
        """Whether both ends see the same messages, so that each sees the marks of the other."""

    def offer(self, terms: Terms, neighbour: Neighbour) -> Offer | None:
        """Hold the sending end ready; None where this rank cannot serve such a link."""

    def reach(self, address: bytes, terms: Terms, neighbour: Neighbour) -> Reached | None:
        """Reach the link that a neighbour has offered; None where that cannot be done from here."""

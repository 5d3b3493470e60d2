"""Messages between two ranks over Gloo; each end has memory of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ray_hetero.distributed.link import Terms, WaitUntilRead
from ray_hetero.distributed.messages import Message
from ray_hetero.distributed.neighbour import Neighbour


class GlooLink:
    """The link over Gloo, which every neighbour can be reached by."""

    name = "Gloo"
    is_one_memory = False

    def offer(self, terms: Terms, neighbour: Neighbour) -> GlooEnd:
        """Hold the sending end ready."""
        return GlooEnd(terms, neighbour)

    def reach(self, address: bytes, terms: Terms, neighbour: Neighbour) -> GlooEnd:
        """Reach the neighbour, with which there is a group already."""
        return GlooEnd(terms, neighbour)


class GlooEnd:
    """An end of the link over Gloo that is not in use yet; it has no memory before."""

    address = b""

    def __init__(self, terms: Terms, neighbour: Neighbour) -> None:
        self._terms = terms
        self._neighbour = neighbour

    def accept(self) -> GlooSender:
        """The sending end."""
        return GlooSender(own_messages(self._terms), self._neighbour, self._terms.timeout_s)

    def take(self, wait_until_read: WaitUntilRead) -> GlooReceiver:
        """The receiving end."""
        limit_s = self._terms.timeout_s
        return GlooReceiver(own_messages(self._terms), self._neighbour, wait_until_read, limit_s)

    def withdraw(self) -> None:
        """Nothing was held ready."""


def own_messages(terms: Terms) -> list[Message]:
    """Messages in memory of this process, page-locked where a GPU copies from or to it."""
    # One message more than batches in flight, so that packing need not wait.  Pages of ordinary
    # memory are there once a step has used them.
    memory = torch.empty(
        (terms.in_flight + 1, terms.packing.message_bytes(terms.capacity)),
        dtype=torch.uint8,
        device="cpu",
        pin_memory=terms.is_on_gpu,
    )
    return [Message(terms.packing, part) for part in memory]


class OverGloo:
    """A message that Gloo sends or receives.

    Args:
        work: Gloo's, whose limit is that of the group.
        neighbour: the rank at the other end.
        limit_s: the group's limit (exchange.timeout_s), for the error.

    """

    def __init__(self, work: dist.Work, neighbour: Neighbour, limit_s: float) -> None:
        self._work = work
        self._neighbour = neighbour
        self._limit_s = limit_s

    def wait(self) -> None:
        """Wait for the message; once only, as Gloo's own wait.

        Raises:
            RuntimeError: the other rank is late, or has ended.

        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self._neighbour.rank}, at the other end of the stage boundary over Gloo, "
                f"is gone or was not there in {self._limit_s:g} s (exchange.timeout_s): {error}"
            ) from None


class GlooSender:
    """The sending end of the link over Gloo.

    Args:
        messages: memory that is sent from, in turn.
        neighbour: the receiver.
        limit_s: longest wait for the receiver (exchange.timeout_s).

    """

    def __init__(self, messages: Sequence[Message], neighbour: Neighbour, limit_s: float) -> None:
        self._messages = itertools.cycle(messages)
        self._neighbour = neighbour
        self._limit_s = limit_s

    def next_message(self) -> Message:
        """The next message to fill; what it last held may still be on its way."""
        return next(self._messages)

    def send(self, message: Message, tokens: int) -> OverGloo:
        """Start sending a message with so many rows."""
        to = self._neighbour
        work = dist.isend(message.of(tokens), dst=to.rank, group=to.group)
        return OverGloo(work, to, self._limit_s)


class GlooReceiver:
    """The receiving end of the link over Gloo.

    Args:
        messages: memory that is received into, in turn.
        neighbour: the sender.
        wait_until_read: waits until what came in a message is not needed any more.
        limit_s: longest wait for the sender (exchange.timeout_s).

    """

    first = None
    """No message that both ends see."""

    def __init__(
        self,
        messages: Sequence[Message],
        neighbour: Neighbour,
        wait_until_read: WaitUntilRead,
        limit_s: float,
    ) -> None:
        self._limit_s = limit_s
        self._messages = itertools.cycle(messages)
        self._neighbour = neighbour
        self._wait_until_read = wait_until_read

    def receive(self, tokens: int) -> tuple[Message, OverGloo]:
        """Start receiving a message with so many rows; it is there when it was waited for."""
        message = next(self._messages)
        self._wait_until_read(message)
        sender = self._neighbour
        work = dist.irecv(message.of(tokens), src=sender.rank, group=sender.group)
        return message, OverGloo(work, sender, self._limit_s)

"""Messages between two stages over Gloo; each side has memory of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ray_hetero.distributed.messages import Message


@dataclass(frozen=True)
class Neighbour:
    """The stage at the other end."""

    rank: int
    """Global."""
    group: dist.ProcessGroup
    """Gloo, with both stages in it."""

    def tell(self, what: Any) -> None:
        """Send it something that can be pickled."""
        dist.send_object_list([what], dst=self.rank, group=self.group)

    def hear(self) -> Any:
        """What it tells."""
        heard: list[Any] = [None]
        dist.recv_object_list(heard, src=self.rank, group=self.group)
        return heard[0]


class GlooSender:
    """The end of the stage that sends."""

    def __init__(self, messages: Sequence[Message], neighbour: Neighbour) -> None:
        self._messages = itertools.cycle(messages)
        self._neighbour = neighbour

    def next_message(self) -> Message:
        """The next message to fill; what it last held may still be on its way."""
        return next(self._messages)

    def send(self, message: Message, tokens: int) -> dist.Work:
        """Start sending a message with so many rows."""
        to = self._neighbour
        return dist.isend(message.of(tokens), dst=to.rank, group=to.group)


class GlooReceiver:
    """The end of the stage that receives.

    Args:
        messages: memory that is received into, in turn.
        neighbour: the sender.
        wait_until_read: waits until what came in a message is not needed any more.

    """

    def __init__(
        self,
        messages: Sequence[Message],
        neighbour: Neighbour,
        wait_until_read: Callable[[Message], None],
    ) -> None:
        self._messages = itertools.cycle(messages)
        self._neighbour = neighbour
        self._wait_until_read = wait_until_read

    def receive(self, tokens: int) -> tuple[Message, dist.Work]:
        """Start receiving a message with so many rows; it is there when the work is done."""
        message = next(self._messages)
        self._wait_until_read(message)
        sender = self._neighbour
        return message, dist.irecv(message.of(tokens), src=sender.rank, group=sender.group)

"""A stage's end of the handover of tokens to expert ranks: what is sent, waited for and watched.

Waits have an owner, the watch.  A GPU that waits for a word in memory has no limit of its own, so
the watch ends its wait when an expert rank has ended, or has not gone on for too long; what the
step then computes is nothing, and `ExpertChannel.problem` says so to whoever would answer with it.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ray_hetero.distributed.expert_memory import HandoverMemory, RemoteLayer, TokenViews, native
from ray_hetero.errors import RankError
from ray_hetero.log import logger

LOOK_SECONDS = 0.05
"""Interval at which the watch looks whether expert ranks go on, in seconds."""
RELEASE_SECONDS = 0.001
"""Interval at which waits are ended once a rank has failed, in seconds: each layer has one."""


class Signals(Protocol):
    """How requests are made and answers waited for: by the host, or by a GPU in its stream."""

    def parts(self, memory: HandoverMemory) -> tuple[torch.Tensor, ...]:
        """`HandoverMemory.parts` as the device of the stage sees them."""

    def write(self, values: torch.Tensor, to: torch.Tensor) -> None:
        """Write a tensor into the memory, of which `to` is a part."""

    def begin_step(self, tokens: int, every: int) -> None:
        """Learn how many tokens the step has, and which are no drafts: every so many, 0 if unknown.

        Rows behind the tokens only fill a captured graph up.
        """

    def write_ids(self, ids: torch.Tensor, to: torch.Tensor) -> None:
        """Write experts of the step's first rows, with -1 for rows that only fill a graph up."""

    def post(self, layer: int, tokens: int) -> None:
        """Ask for a layer, once what was written before is there."""

    def wait(self) -> bool:
        """Delay later work until all answers are there; False if the channel has failed."""


class HostSignals:
    """Requests and answers of a stage that computes on the host.

    Args:
        sender: the words.

    """

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def parts(self, memory: HandoverMemory) -> tuple[torch.Tensor, ...]:
        """The memory as it is."""
        return memory.parts

    def write(self, values: torch.Tensor, to: torch.Tensor) -> None:
        """Copy the tensor."""
        to.copy_(values)

    def begin_step(self, tokens: int, every: int) -> None:
        """Say which rows are no drafts; a step of the host has no rows but its tokens."""
        self._sender.mark(every)

    def write_ids(self, ids: torch.Tensor, to: torch.Tensor) -> None:
        """Copy them."""
        to.copy_(ids)

    def post(self, layer: int, tokens: int) -> None:
        """Set the requests."""
        self._sender.post(layer, tokens)

    def wait(self) -> bool:
        """Wait for the answers, or until the watch ends the wait."""
        found: bool = self._sender.wait()
        return found


class ExpertChannel:
    """The channel of one rank of a stage to all expert ranks.

    Args:
        memory: what they share.
        layers: in the order of their numbers.
        connections: by number of the expert rank; each can be read once that rank has ended.
        names: what people call the expert ranks, by number.
        limit_s: longest time that an expert rank may take for one layer, in seconds.
        signals: made from the words; the host's unless given.

    """

    def __init__(
        self,
        memory: HandoverMemory,
        layers: Sequence[RemoteLayer],
        connections: Sequence[socket.socket],
        names: Sequence[str],
        limit_s: float,
        signals: Any = HostSignals,
    ) -> None:
        self._memory = memory
        self._sender = native().Sender(memory.memory.data_ptr(), len(names))
        self._signals: Signals = signals(self._sender)
        parts = self._signals.parts(memory)
        self._views = [TokenViews.of(memory.geometry, layer, parts) for layer in layers]
        self._names = tuple(names)
        self._limit_s = limit_s
        self.problem: Exception | None = None
        """Error that has ended the channel, which gives no results then; None while it works."""
        self._stop = threading.Event()
        self._connections = list(connections)
        self._watch = threading.Thread(target=self._look, daemon=True, name="ExpertWatch")
        self._watch.start()

    @property
    def capacity(self) -> int:
        """Most tokens of one handover."""
        return self._memory.geometry.capacity

    @property
    def slot_orders(self) -> Any:
        """Native object that has the first expert rank's orders for slots, a `SlotOrders`."""
        return self._sender

    def begin_step(self, tokens: int, every: int = 1) -> None:
        """Learn how many tokens the step has, before any layer of it is handed over.

        Args:
            tokens: of the step.
            every: distance between two of them that are no drafts; 0 where that is not known.

        """
        self._signals.begin_step(tokens, every)

    def hand_over(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int
    ) -> None:
        """Ask all expert ranks for a layer of these tokens.

        Args:
            x: [M, hidden], up to `capacity` tokens.
            weights: [M, chosen].
            ids: [M, chosen].
            layer: its number.

        """
        tokens, views = x.shape[0], self._views[layer]
        self._signals.write(x, views.x[:tokens])
        self._signals.write_ids(ids, views.ids[:tokens])
        self._signals.write(weights, views.weights[:tokens])
        self._signals.post(layer, tokens)

    def begin(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int) -> None:
        """Hand a layer's tokens over, as many as there is room for.

        Args:
            x: [M, hidden], at least one token.
            weights: [M, chosen].
            ids: [M, chosen]; a negative one is none, and adds nothing.
            layer: its number.

        """
        most = self.capacity
        self.hand_over(x[:most], weights[:most], ids[:most], layer)

    def sums(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Sums [M, hidden] of what `begin` was given, the same; hands the rest over, in pieces.

        Raises:
            RankError: as `take`.
            torch.distributed.DistNetworkError: as `take`.

        """
        tokens, most = x.shape[0], self.capacity
        first = self.take(min(tokens, most), layer)
        if tokens <= most:
            return first
        sums = torch.empty_like(x)
        sums[:most] = first
        for begin in range(most, tokens, most):
            piece = slice(begin, min(begin + most, tokens))
            self.hand_over(x[piece], weights[piece], ids[piece], layer)
            sums[piece] = self.take(piece.stop - begin, layer)
        return sums

    def check(self) -> None:
        """Raise what has ended the channel, if anything has; what `take` raises on the host."""
        if self.problem is not None and isinstance(self._signals, HostSignals):
            raise self.problem

    def take(self, tokens: int, layer: int) -> torch.Tensor:
        """Wait for the sums of a layer, and add them up.

        Args:
            tokens: as many as were handed over.
            layer: its number.

        Returns:
            [M, hidden].

        Raises:
            RankError: an expert rank is late; on a GPU that is known behind the step only.
            torch.distributed.DistNetworkError: an expert rank has ended; as above.

        """
        if not self._signals.wait():
            assert self.problem is not None, "the watch tells before it ends waits"
            raise self.problem
        first, *others = (result[:tokens] for result in self._views[layer].results)
        if not others:
            # Not a copy: see `GpuSignals.write`.
            return first * 1
        sums = first + others[0]
        for more in others[1:]:
            sums += more
        return sums

    def close(self) -> None:
        """Watch no more."""
        self._stop.set()
        self._watch.join()
        for connection in self._connections:
            connection.close()

    def _look(self) -> None:
        owing: dict[int, int] = {}
        since = time.monotonic()
        # `select` takes no descriptor above 1,023.
        ends = {connection.fileno(): at for at, connection in enumerate(self._connections)}
        poll = select.poll()
        for descriptor in ends:
            poll.register(descriptor, select.POLLIN)
        while self.problem is None:
            if self._stop.is_set():
                return
            if readable := poll.poll(LOOK_SECONDS * 1000):
                number = ends[readable[0][0]]
                self.problem = dist.DistNetworkError(
                    f"{self._names[number]} has closed the connection"
                )
                break
            found = dict(self._sender.owing())
            # Whoever has answered meanwhile goes on.
            if not any(owing.get(number) == count for number, count in found.items()):
                owing, since = found, time.monotonic()
            elif time.monotonic() - since > self._limit_s:
                self.problem = self._late(list(owing.items()))
        logger.error("experts: %s", self.problem)
        while not self._stop.wait(RELEASE_SECONDS):
            self._sender.release()

    def _late(self, owing: Sequence[tuple[int, int]]) -> RankError:
        late = " and ".join(self._names[number] for number, _ in owing) or "no rank"
        return RankError(
            f"{late} did not compute a layer's experts in {self._limit_s:g} s (exchange.timeout_s)"
        )

"""Tensor exchange between pipeline stages, through host memory.

Both sides of a stage boundary know the number of tokens of a step from the scheduler's output, so
nothing but one message of the step's rows crosses it.  Stages of one host share the memory of
messages (`shared_memory_link.py`); others send them over Gloo (`gloo_link.py`).  It is allocated
once.  A GPU rank packs the rows on its device and copies them from, or to, pinned memory in one
piece; a CPU rank reads its tensors where they have arrived.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from ray_hetero.distributed.gloo_link import GlooReceiver, GlooSender, Neighbour
from ray_hetero.distributed.linking import Linking, Signature
from ray_hetero.distributed.messages import Exchanged, Message, OnItsWay, Packing, Tensors
from ray_hetero.distributed.shared_memory_link import (
    Arrival,
    SharedMemoryReceiver,
    SharedMemorySender,
)

Sender = GlooSender | SharedMemorySender


class Sent:
    """One step's message to the next stage, on its way."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: RuntimeError | None = None

    def finish(self, error: RuntimeError | None = None) -> None:
        """Mark the message as sent, or as failed."""
        self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        """Whether the message has been sent."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until it has been sent; raises what sending it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class AllOnTheirWay:
    """One step's messages to several ranks of the next stage, or to none."""

    def __init__(self, ways: Sequence[OnItsWay]) -> None:
        self._ways = ways

    def is_completed(self) -> bool:
        """Whether all have been sent."""
        return all(way.is_completed() for way in self._ways)

    def wait(self) -> None:
        """Wait until all have been sent; raises what sending one raised."""
        for way in self._ways:
            way.wait()


class Staging:
    """The device's side of a GPU rank's messages in one direction, for up to `capacity` tokens."""

    def __init__(self, packing: Packing, capacity: int, device: torch.device) -> None:
        self.rows = torch.zeros((capacity, packing.row_bytes), dtype=torch.uint8, device=device)
        self.tensors = packing.views(self.rows)


class Receiving:
    """A message on its way here; vLLM waits for it where it first needs the tensors."""

    def __init__(self, boundary: StageBoundary, way: Arrival | dist.Work, message: Message) -> None:
        self._boundary = boundary
        self._way = way
        self._message = message

    def wait(self) -> None:
        """Wait for the message; the boundary adds the time up."""
        start = time.perf_counter()
        self._way.wait()
        self._boundary.arrived(self._message, start, time.perf_counter())


class StageBoundary:
    """Sends a pipeline stage's output to the next stage and receives the previous one's.

    Args:
        group: Gloo group of the ranks of this pipeline, one a stage.
        ranks: their global ranks, by stage; this rank receives from the one before it.
        rank_in_group: this rank's stage.
        device: where this rank computes.
        receivers: global ranks of the next stage that this rank sends to: several where that stage
            is larger, none where another rank of this stage sends in its place; None is the rank
            behind this one.
        may_share: share memory with stages of the same host; False is for comparisons.

    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: list[int],
        rank_in_group: int,
        device: torch.device,
        *,
        receivers: Sequence[int] | None = None,
        may_share: bool = True,
    ) -> None:
        following = ranks[rank_in_group + 1 : rank_in_group + 2]
        has_previous = rank_in_group > 0
        self._previous = Neighbour(ranks[rank_in_group - 1], group) if has_previous else None
        self._next = [
            Neighbour(rank, group) for rank in (following if receivers is None else receivers)
        ]
        self._device = device
        self._may_share = may_share
        self._stages = len(ranks)
        self._rows = 0
        self._exchanged = Exchanged()
        self._is_clock_shared = False
        self._computed_at = 0.0
        self._senders: list[Sender] = []
        self._receiver: GlooReceiver | SharedMemoryReceiver
        self._copied = defaultdict[int, torch.cuda.Event](torch.cuda.Event)
        self._staging_in: Staging | None = None
        self._staging_out: Staging | None = None
        self._work: queue.SimpleQueue[Callable[[], None]] | None = None

    def agree(
        self,
        template: Mapping[str, torch.Tensor],
        capacity: int,
        timeout_s: float = 600,
        numa_nodes: tuple[int, ...] = (),
    ) -> None:
        """Agree with the neighbours on what crosses, and allocate all memory.

        Args:
            template: the model's intermediate tensors, [tokens, …] each.
            capacity: most tokens of one step.
            timeout_s: longest wait for a stage of the same host, now and in each step.
            numa_nodes: of a CPU rank.

        Raises:
            AgreementError: the previous stage sends other tensors than this one takes.
            RuntimeError: a neighbour is late, or has ended.

        """
        packing = Packing(template)
        linking = Linking(
            Signature.of(template, capacity), packing, self._device, self._stages,
            may_share=self._may_share, timeout_s=timeout_s, numa_nodes=numa_nodes,
        )  # fmt: skip
        self._senders = [linking.to_next(neighbour) for neighbour in self._next]
        if self._senders and self._is_gpu:
            self._staging_out = Staging(packing, capacity, self._device)
            self._start_sender()
        if self._previous is not None:
            self._receiver, self._is_clock_shared = linking.to_previous(
                self._previous, self._wait_until_read
            )
            self._staging_in = Staging(packing, capacity, self._device) if self._is_gpu else None

    @property
    def _is_gpu(self) -> bool:
        return bool(self._device.type != "cpu")

    def _wait_until_read(self, message: Message) -> None:
        """Until a GPU has copied what came; a CPU has computed with it before its next step."""
        if self._is_gpu:
            self._copied[id(message)].synchronize()

    def begin_step(self, tokens: int) -> None:
        """Tell how many tokens the next step has: the rows that cross this boundary."""
        self._rows = tokens

    def isend(self, tensors: Mapping[str, torch.Tensor]) -> OnItsWay:
        """Start sending this step's rows to the next stage; tensors are [at least rows, …].

        The caller may drop or overwrite the tensors at once: on a CPU they have been copied, on a
        GPU later kernels run behind the copy on the same stream.
        """
        start = time.perf_counter()
        if self._staging_out is not None and self._senders:
            for name, place in self._staging_out.tensors.items():
                place[: self._rows].copy_(tensors[name][: self._rows])
        ways = [self._send(sender, tensors, start) for sender in self._senders]
        self._exchanged.exchange_s += time.perf_counter() - start
        return ways[0] if len(ways) == 1 else AllOnTheirWay(ways)

    def _send(self, sender: Sender, tensors: Mapping[str, torch.Tensor], start: float) -> OnItsWay:
        message = sender.next_message()
        message.wait_until_sent()
        send = self._send_staged if self._is_gpu else self._send_here
        message.sent = send(sender, message, tensors, start)
        self._exchanged.sent_bytes += message.of(self._rows).nbytes
        return message.sent

    def _send_here(
        self, sender: Sender, message: Message, tensors: Mapping[str, torch.Tensor], start: float
    ) -> OnItsWay:
        for name, place in message.tensors.items():
            place[: self._rows].copy_(tensors[name][: self._rows])
        message.computed_at = start
        return sender.send(message, self._rows)

    def _send_staged(
        self, sender: Sender, message: Message, tensors: Mapping[str, torch.Tensor], start: float
    ) -> OnItsWay:
        assert self._staging_out is not None
        assert self._work is not None
        rows = self._rows
        message.rows[:rows].copy_(self._staging_out.rows[:rows], non_blocking=True)
        self._copied[id(message)].record()
        sent = Sent()
        self._work.put(lambda: self._finish_send(sender, message, rows, sent))
        return sent

    def _start_sender(self) -> None:
        self._work = queue.SimpleQueue()
        threading.Thread(
            target=self._send_in_order, args=(self._work,), daemon=True, name="StageBoundarySend"
        ).start()

    @staticmethod
    def _send_in_order(work: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            work.get()()

    def _finish_send(self, sender: Sender, message: Message, rows: int, sent: Sent) -> None:
        try:
            self._copied[id(message)].synchronize()
            message.computed_at = self._computed_at = time.perf_counter()
            sender.send(message, rows).wait()
        except RuntimeError as error:
            sent.finish(error)
        else:
            sent.finish()

    def irecv(self) -> tuple[Tensors, list[Receiving], list[Callable[[], None]]]:
        """Start receiving this step's rows from the previous stage.

        Returns:
            The tensors, [capacity, …] on this rank's device, of which the step's rows are valid
            once the handle has been waited for and then the callback has been called.

        """
        message, way = self._receiver.receive(self._rows)
        self._exchanged.received_bytes += message.of(self._rows).nbytes
        receiving = [Receiving(self, way, message)]
        if self._staging_in is None:
            return message.tensors, receiving, []
        rows = self._rows
        return self._staging_in.tensors, receiving, [lambda: self._to_device(message, rows)]

    def _to_device(self, message: Message, rows: int) -> None:
        assert self._staging_in is not None
        start = time.perf_counter()
        self._staging_in.rows[:rows].copy_(message.rows[:rows], non_blocking=True)
        self._copied[id(message)].record()
        self._exchanged.exchange_s += time.perf_counter() - start

    def arrived(self, message: Message, start: float, end: float) -> None:
        """A message was waited for from `start` to `end`, in seconds of this rank's clock."""
        computed = end
        if self._is_clock_shared:
            computed = min(max(start, message.computed_at), end)
        self._exchanged.waiting_s += computed - start
        self._exchanged.exchange_s += end - computed

    def take(self) -> Exchanged:
        """What has been exchanged since the last call."""
        taken, self._exchanged = self._exchanged, Exchanged()
        return taken

    @property
    def computed_at(self) -> float:
        """When a GPU had computed what was last sent, on this rank's clock; 0 on a CPU rank."""
        return self._computed_at

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ray_hetero import shared_memory_link
from ray_hetero.errors import AgreementError
from ray_hetero.gloo_link import GlooReceiver, GlooSender, Neighbour
from ray_hetero.locked_pages import lock_pages
from ray_hetero.messages import Message, OnItsWay, Packing, Tensors
from ray_hetero.progress import logger
from ray_hetero.shared_memory_link import (
    Arrival,
    SharedMemoryReceiver,
    SharedMemorySender,
    SharedMessages,
)
from ray_hetero.step_clock import Exchanged

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Signature:
    """What crosses a stage boundary for each token; both sides must agree on it."""

    tensors: tuple[tuple[str, tuple[int, ...], str], ...]
    """Name, shape of one token's row and dtype of each tensor, in the order they are packed."""
    capacity: int
    """Most tokens of a step."""

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], capacity: int) -> Signature:
        """Read the signature off tensors of shape [tokens, …]."""
        rows = ((name, tuple(t.shape[1:]), str(t.dtype)) for name, t in tensors.items())
        return cls(tuple(sorted(rows)), capacity)


@dataclass(frozen=True)
class Introduction:
    """What a stage tells the next one once."""

    signature: Signature
    boot_id: str
    """Of its host: ranks with the same one read the same clock."""
    address: bytes | None
    """Where it hands shared memory over; None where it has none."""


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
        """Wait until it has been sent; raises what Gloo raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error


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
        ranks: their global ranks, by stage.
        rank_in_group: this rank's stage.
        device: where this rank computes.
        may_share: share memory with stages of the same host; False is for comparisons.

    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: list[int],
        rank_in_group: int,
        device: torch.device,
        *,
        may_share: bool = True,
    ) -> None:
        has_previous, has_next = rank_in_group > 0, rank_in_group + 1 < len(ranks)
        self._previous = Neighbour(ranks[rank_in_group - 1], group) if has_previous else None
        self._next = Neighbour(ranks[rank_in_group + 1], group) if has_next else None
        self._device = device
        self._may_share = may_share
        # One message more than batches in flight (one a stage), so that packing need not wait.
        self._depth = len(ranks) + 1
        self._rows = 0
        self._exchanged = Exchanged()
        self._is_clock_shared = False
        self._computed_at = 0.0
        self._sender: GlooSender | SharedMemorySender
        self._receiver: GlooReceiver | SharedMemoryReceiver
        self._copied: dict[int, torch.cuda.Event] = {}
        self._staging_in: Staging | None = None
        self._staging_out: Staging | None = None
        self._work: queue.SimpleQueue[Callable[[], None]] | None = None

    def agree(
        self, template: Mapping[str, torch.Tensor], capacity: int, timeout_s: float = 600
    ) -> None:
        """Agree with the neighbours on what crosses, and allocate all memory.

        Args:
            template: the model's intermediate tensors, [tokens, …] each.
            capacity: most tokens of one step.
            timeout_s: longest wait for a stage of the same host, now and in each step.

        Raises:
            AgreementError: the previous stage sends other tensors than this one takes.
            RuntimeError: a neighbour is late, or has ended.

        """
        signature, packing = Signature.of(template, capacity), Packing(template)
        if self._next is not None:
            self._sender = self._link_to(self._next, signature, packing, timeout_s)
            if self._is_gpu:
                self._staging_out = Staging(packing, capacity, self._device)
                self._start_sender()
        if self._previous is not None:
            self._receiver = self._link_from(self._previous, signature, packing, timeout_s)
            self._staging_in = Staging(packing, capacity, self._device) if self._is_gpu else None

    @property
    def _is_gpu(self) -> bool:
        return bool(self._device.type != "cpu")

    def _link_to(
        self, neighbour: Neighbour, signature: Signature, packing: Packing, timeout_s: float
    ) -> GlooSender | SharedMemorySender:
        offer = self._offer(packing, signature.capacity, timeout_s) if self._may_share else None
        address = None if offer is None else offer.address
        neighbour.tell(Introduction(signature, BOOT_ID.read_text().strip(), address))
        is_wanted = neighbour.hear()
        if offer is not None and is_wanted:
            logger.info("ray_hetero: shares the memory of messages to rank %d", neighbour.rank)
            return SharedMemorySender(self._mapped(offer.shared), offer.accept())
        if offer is not None:
            offer.withdraw()
        logger.info("ray_hetero: sends messages to rank %d over Gloo", neighbour.rank)
        return GlooSender(self._own_messages(packing, signature.capacity), neighbour)

    def _offer(
        self, packing: Packing, capacity: int, timeout_s: float
    ) -> shared_memory_link.Offer | None:
        # One message more than over Gloo: the receiver gives the oldest back with its next step.
        number = self._depth + 1
        try:
            return shared_memory_link.Offer(packing, capacity, number, timeout_s)
        except OSError as error:
            logger.warning("ray_hetero: no memory is shared with the next stage: %s", error)
            return None

    def _link_from(
        self, neighbour: Neighbour, signature: Signature, packing: Packing, timeout_s: float
    ) -> GlooReceiver | SharedMemoryReceiver:
        heard: Introduction = neighbour.hear()
        self._is_clock_shared = heard.boot_id == BOOT_ID.read_text().strip()
        is_agreed = heard.signature == signature
        connection = None
        is_near = self._may_share and self._is_clock_shared
        if is_agreed and is_near and heard.address is not None:
            connection = shared_memory_link.connected(heard.address, timeout_s)
        neighbour.tell(connection is not None)
        if not is_agreed:
            raise AgreementError(
                f"intermediate tensors: rank {neighbour.rank} sends {heard.signature}, "
                f"rank {dist.get_rank()} takes {signature}"
            )
        if connection is None:
            messages = self._own_messages(packing, signature.capacity)
            return GlooReceiver(messages, neighbour, self._wait_until_read)
        number = self._depth + 1
        shared = shared_memory_link.take(connection, packing, signature.capacity, number)
        return SharedMemoryReceiver(self._mapped(shared), connection, self._wait_until_read)

    def _own_messages(self, packing: Packing, capacity: int) -> list[Message]:
        # Pages of ordinary memory are there once a step has used them.
        memory = torch.empty(
            (self._depth, packing.message_bytes(capacity)),
            dtype=torch.uint8,
            device="cpu",
            pin_memory=self._is_gpu,
        )
        return self._prepared([Message(packing, part) for part in memory])

    def _mapped(self, shared: SharedMessages) -> list[Message]:
        if self._is_gpu:
            lock_pages(shared.memory, self._device)
        return self._prepared(shared.messages)

    def _prepared(self, messages: list[Message]) -> list[Message]:
        if self._is_gpu:
            self._copied |= {id(message): torch.cuda.Event() for message in messages}
        return messages

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
        message = self._sender.next_message()
        send = self._send_staged if self._is_gpu else self._send_here
        message.sent = send(message, tensors, start)
        self._exchanged.sent_bytes += message.of(self._rows).nbytes
        self._exchanged.exchange_s += time.perf_counter() - start
        return message.sent

    def _send_here(
        self, message: Message, tensors: Mapping[str, torch.Tensor], start: float
    ) -> OnItsWay:
        for name, place in message.tensors.items():
            place[: self._rows].copy_(tensors[name][: self._rows])
        message.computed_at = start
        return self._sender.send(message, self._rows)

    def _send_staged(
        self, message: Message, tensors: Mapping[str, torch.Tensor], start: float
    ) -> OnItsWay:
        assert self._staging_out is not None
        assert self._work is not None
        rows = self._rows
        for name, place in self._staging_out.tensors.items():
            place[:rows].copy_(tensors[name][:rows])
        message.rows[:rows].copy_(self._staging_out.rows[:rows], non_blocking=True)
        self._copied[id(message)].record()
        sent = Sent()
        self._work.put(lambda: self._finish_send(message, rows, sent))
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

    def _finish_send(self, message: Message, rows: int, sent: Sent) -> None:
        try:
            self._copied[id(message)].synchronize()
            message.computed_at = self._computed_at = time.perf_counter()
            self._sender.send(message, rows).wait()
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

"""Tensor exchange between pipeline stages, over Gloo through host memory.

Both sides of a stage boundary know the number of tokens of a step from the scheduler's output, so
nothing but one message of the step's rows crosses it:

    header │ row 0: hidden states, residual │ row 1: … │ …

The memory of messages is allocated once.  Gloo sends and receives host memory only, so a GPU rank
packs the rows on its device and copies them from, or to, pinned memory in one piece; a CPU rank
reads its tensors where they have arrived.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ray_hetero.errors import AgreementError
from ray_hetero.step_clock import Exchanged

Tensors = dict[str, torch.Tensor]

HEADER_BYTES = 64
ALIGNMENT = 64
"""Bytes to whose multiple each tensor's part of a row is filled up."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Signature:
    """What crosses a stage boundary for each token; both sides must agree on it."""

    tensors: tuple[tuple[str, tuple[int, ...], str], ...]
    """Name, shape of one token's row and dtype of each tensor, in the order they are packed."""

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Signature:
        """Read the signature off tensors of shape [tokens, …]."""
        rows = ((name, tuple(t.shape[1:]), str(t.dtype)) for name, t in tensors.items())
        return cls(tuple(sorted(rows)))


@dataclass(frozen=True)
class Introduction:
    """What a stage tells the next one once."""

    signature: Signature
    boot_id: str
    """Of its host: ranks with the same one read the same clock."""


class Packing:
    """How the tensors of a token lie in a row, one behind the other."""

    def __init__(self, template: Mapping[str, torch.Tensor]) -> None:
        self._parts: dict[str, tuple[int, int, tuple[int, ...], torch.dtype]] = {}
        end = 0
        for name in sorted(template):
            shape, dtype = tuple(template[name].shape[1:]), template[name].dtype
            nbytes = prod(shape) * dtype.itemsize
            self._parts[name] = (end, end + nbytes, shape, dtype)
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.row_bytes = end

    def views(self, rows: torch.Tensor) -> Tensors:
        """The tensors inside a block of rows.

        Args:
            rows: uint8, [tokens, row_bytes].

        Returns:
            Views of shape [tokens, …], by name.

        """
        return {
            name: rows[:, begin:end].view(dtype).unflatten(1, shape)
            for name, (begin, end, shape, dtype) in self._parts.items()
        }


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


class Message:
    """Host memory of one step's message, for up to `capacity` tokens.

    Args:
        packing: how the tensors lie in a row.
        capacity: most tokens.
        is_pinned: whether a GPU copies from or to it.

    """

    def __init__(self, packing: Packing, capacity: int, *, is_pinned: bool) -> None:
        # Pages of ordinary memory are there once a step has used them.
        self._bytes = torch.empty(
            HEADER_BYTES + capacity * packing.row_bytes,
            dtype=torch.uint8,
            device="cpu",
            pin_memory=is_pinned,
        )
        self._row_bytes = packing.row_bytes
        # Written by threads that are not in inference mode, hence not through torch.
        self._stamp = self._bytes[:8].numpy().view(np.float64)
        self.rows = self._bytes[HEADER_BYTES:].view(capacity, packing.row_bytes)
        self.tensors = packing.views(self.rows)
        self.sent: Sent | dist.Work | None = None

    @property
    def computed_at(self) -> float:
        """When the sender had the tensors, in seconds of its clock."""
        return float(self._stamp[0])

    @computed_at.setter
    def computed_at(self, seconds: float) -> None:
        self._stamp[0] = seconds

    def of(self, tokens: int) -> torch.Tensor:
        """The part of it that a step of so many tokens needs."""
        return self._bytes[: HEADER_BYTES + tokens * self._row_bytes]

    def wait_until_sent(self) -> None:
        """Wait until the memory may be written again."""
        if self.sent is not None:
            self.sent.wait()
            self.sent = None


class Staging:
    """The device's side of a GPU rank's messages in one direction, for up to `capacity` tokens."""

    def __init__(self, packing: Packing, capacity: int, device: torch.device) -> None:
        self.rows = torch.zeros((capacity, packing.row_bytes), dtype=torch.uint8, device=device)
        self.tensors = packing.views(self.rows)


class Receiving:
    """A message on its way here; vLLM waits for it where it first needs the tensors."""

    def __init__(self, boundary: StageBoundary, work: dist.Work, message: Message) -> None:
        self._boundary = boundary
        self._work = work
        self._message = message

    def wait(self) -> None:
        """Wait for the message; the boundary adds the time up."""
        start = time.perf_counter()
        self._work.wait()
        self._boundary.arrived(self._message, start, time.perf_counter())


class StageBoundary:
    """Sends a pipeline stage's output to the next stage and receives the previous one's.

    Args:
        group: Gloo group of the ranks of this pipeline, one a stage.
        ranks: their global ranks, by stage.
        rank_in_group: this rank's stage.
        device: where this rank computes.

    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: list[int], rank_in_group: int, device: torch.device
    ) -> None:
        self._group = group
        self._previous = ranks[rank_in_group - 1] if rank_in_group > 0 else None
        self._next = ranks[rank_in_group + 1] if rank_in_group + 1 < len(ranks) else None
        self._device = device
        # One message more than batches in flight (one a stage), so that packing need not wait.
        self._depth = len(ranks) + 1
        self._rows = 0
        self._steps = 0
        self._exchanged = Exchanged()
        self._is_clock_shared = False
        self._computed_at = 0.0
        self._incoming: list[Message] = []
        self._outgoing: list[Message] = []
        self._copied: dict[int, torch.cuda.Event] = {}
        self._staging_in: Staging | None = None
        self._staging_out: Staging | None = None
        self._work: queue.SimpleQueue[Callable[[], None]] | None = None

    def agree(self, template: Mapping[str, torch.Tensor], capacity: int) -> None:
        """Agree with the neighbours on what crosses, and allocate all memory.

        Args:
            template: the model's intermediate tensors, [tokens, …] each.
            capacity: most tokens of one step.

        Raises:
            AgreementError: the previous stage sends other tensors than this one takes.

        """
        self._introduce(Signature.of(template))
        packing, is_gpu = Packing(template), self._is_gpu
        if self._previous is not None:
            self._incoming = self._messages(packing, capacity)
            self._staging_in = Staging(packing, capacity, self._device) if is_gpu else None
        if self._next is not None:
            self._outgoing = self._messages(packing, capacity)
            if is_gpu:
                self._staging_out = Staging(packing, capacity, self._device)
                self._start_sender()

    @property
    def _is_gpu(self) -> bool:
        return bool(self._device.type != "cpu")

    def _messages(self, packing: Packing, capacity: int) -> list[Message]:
        messages = [Message(packing, capacity, is_pinned=self._is_gpu) for _ in range(self._depth)]
        if self._is_gpu:
            self._copied |= {id(message): torch.cuda.Event() for message in messages}
        return messages

    def _introduce(self, mine: Signature) -> None:
        here = BOOT_ID.read_text().strip()
        if self._next is not None:
            told = [Introduction(mine, here)]
            dist.send_object_list(told, dst=self._next, group=self._group)
        if self._previous is not None:
            heard: list[Introduction | None] = [None]
            dist.recv_object_list(heard, src=self._previous, group=self._group)
            assert heard[0] is not None
            self._is_clock_shared = heard[0].boot_id == here
            if heard[0].signature != mine:
                raise AgreementError(
                    f"intermediate tensors: rank {self._previous} sends {heard[0].signature}, "
                    f"rank {dist.get_rank()} takes {mine}"
                )

    def begin_step(self, tokens: int) -> None:
        """Tell how many tokens the next step has: the rows that cross this boundary."""
        self._rows = tokens
        self._steps += 1

    def isend(self, tensors: Mapping[str, torch.Tensor]) -> Sent | dist.Work:
        """Start sending this step's rows to the next stage; tensors are [at least rows, …].

        The caller may drop or overwrite the tensors at once: on a CPU they have been copied, on a
        GPU later kernels run behind the copy on the same stream.
        """
        start = time.perf_counter()
        message = self._outgoing[self._steps % self._depth]
        message.wait_until_sent()
        send = self._send_staged if self._is_gpu else self._send_here
        message.sent = send(message, tensors, start)
        self._exchanged.sent_bytes += message.of(self._rows).nbytes
        self._exchanged.exchange_s += time.perf_counter() - start
        return message.sent

    def _send_here(
        self, message: Message, tensors: Mapping[str, torch.Tensor], start: float
    ) -> dist.Work:
        for name, place in message.tensors.items():
            place[: self._rows].copy_(tensors[name][: self._rows])
        message.computed_at = start
        return dist.isend(message.of(self._rows), dst=self._next, group=self._group)

    def _send_staged(
        self, message: Message, tensors: Mapping[str, torch.Tensor], start: float
    ) -> Sent:
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
            dist.isend(message.of(rows), dst=self._next, group=self._group).wait()
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
        assert self._previous is not None
        message = self._incoming[self._steps % self._depth]
        if self._is_gpu:
            self._copied[id(message)].synchronize()
        whole = message.of(self._rows)
        self._exchanged.received_bytes += whole.nbytes
        work = dist.irecv(whole, src=self._previous, group=self._group)
        receiving = [Receiving(self, work, message)]
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

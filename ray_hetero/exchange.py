"""Tensor exchange between ranks of different kinds, over Gloo through host memory.

Gloo sends and receives host memory only.  A GPU rank therefore copies to pinned buffers that are
allocated once; a CPU rank sends from, and receives into, ordinary memory.  Both sides of a stage
boundary know the number of tokens of a step from the scheduler's output, so nothing but the
tensors themselves crosses it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ray_hetero.errors import AgreementError

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Signature:
    """What crosses a stage boundary for each token; both sides must agree on it."""

    tensors: tuple[tuple[str, tuple[int, ...], str], ...]
    """Name, shape of one token's row and dtype of each tensor, in the order they are sent."""

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Signature:
        """Read the signature off tensors of shape [tokens, …]."""
        rows = ((name, tuple(t.shape[1:]), str(t.dtype)) for name, t in tensors.items())
        return cls(tuple(sorted(rows)))


class Sent:
    """One step's sends to the next stage, on their way."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: RuntimeError | None = None

    def finish(self, error: RuntimeError | None = None) -> None:
        """Mark the sends as done, or as failed."""
        self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        """Whether the tensors may be freed."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait for the sends; raises what Gloo raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class _Slot:
    """Pinned host copies of one step's tensors on a GPU rank, each [capacity, …]."""

    def __init__(self, template: Mapping[str, torch.Tensor], capacity: int) -> None:
        self.host = {
            name: torch.empty(
                (capacity, *tensor.shape[1:]), dtype=tensor.dtype, device="cpu", pin_memory=True
            )
            for name, tensor in template.items()
        }
        self.copied = torch.cuda.Event()
        self.sent: Sent | None = None


class Receiving:
    """One tensor on its way here; vLLM waits for it where it first needs the tensors."""

    def __init__(self, boundary: StageBoundary, work: dist.Work) -> None:
        self._boundary = boundary
        self._work = work

    def wait(self) -> None:
        """Wait for the tensor; the boundary adds the time up."""
        self._boundary._wait(self._work)


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
        # One slot more than batches in flight (one a stage), so that a copy need not wait.
        self._depth = len(ranks) + 1
        self._rows = 0
        self._steps = 0
        self._waited_s = 0.0
        self._received_bytes = 0
        self._order: tuple[str, ...] = ()
        self._received: Tensors = {}
        self._incoming: list[_Slot] = []
        self._outgoing: list[_Slot] = []
        self._in_flight: deque[Sent] = deque()
        self._work: queue.SimpleQueue[Callable[[], None]] | None = None

    def agree(self, template: Mapping[str, torch.Tensor], capacity: int) -> None:
        """Agree with the neighbours on what crosses, and allocate the buffers once.

        Args:
            template: the model's intermediate tensors, [tokens, …] each.
            capacity: most tokens of one step.

        Raises:
            AgreementError: the previous stage sends other tensors than this one takes.

        """
        mine = Signature.of(template)
        self._order = tuple(name for name, _, _ in mine.tensors)
        self._compare(mine)
        is_gpu = self._device.type != "cpu"
        if self._previous is not None:
            self._received = {
                name: torch.zeros(
                    (capacity, *tensor.shape[1:]), dtype=tensor.dtype, device=self._device
                )
                for name, tensor in template.items()
            }
        if not is_gpu:
            return
        if self._previous is not None:
            self._incoming = [_Slot(template, capacity) for _ in range(self._depth)]
        if self._next is not None:
            self._outgoing = [_Slot(template, capacity) for _ in range(self._depth)]
            self._work = queue.SimpleQueue()
            threading.Thread(
                target=self._send_in_order,
                args=(self._work,),
                daemon=True,
                name="StageBoundarySend",
            ).start()

    def _compare(self, mine: Signature) -> None:
        if self._next is not None:
            dist.send_object_list([mine], dst=self._next, group=self._group)
        if self._previous is not None:
            theirs: list[Signature | None] = [None]
            dist.recv_object_list(theirs, src=self._previous, group=self._group)
            if theirs[0] != mine:
                raise AgreementError(
                    f"intermediate tensors: rank {self._previous} sends {theirs[0]}, "
                    f"rank {dist.get_rank()} takes {mine}"
                )

    def begin_step(self, tokens: int) -> None:
        """Tell how many tokens the next step has: the rows that cross this boundary."""
        self._rows = tokens
        self._steps += 1

    def isend(self, tensors: Mapping[str, torch.Tensor]) -> Sent:
        """Start sending this step's rows to the next stage; tensors are [at least rows, …].

        The caller may drop or overwrite the tensors at once on a GPU (later kernels run behind
        the copy on the same stream) and drop them on a CPU.
        """
        assert self._next is not None
        if self._device.type != "cpu":
            return self._send_staged(tensors)
        while self._in_flight and self._in_flight[0].is_completed():
            self._in_flight.popleft().wait()
        rows = [tensors[name][: self._rows].contiguous() for name in self._order]
        works = [dist.isend(tensor, dst=self._next, group=self._group) for tensor in rows]
        self._in_flight.append(_HostSends(works, rows))
        return self._in_flight[-1]

    def _send_staged(self, tensors: Mapping[str, torch.Tensor]) -> Sent:
        slot = self._outgoing[self._steps % self._depth]
        if slot.sent is not None:
            slot.sent.wait()
        rows = {name: slot.host[name][: self._rows] for name in self._order}
        for name, host in rows.items():
            host.copy_(tensors[name][: self._rows], non_blocking=True)
        slot.copied.record()
        sent = slot.sent = Sent()
        assert self._work is not None
        self._work.put(lambda: self._finish_send(slot, rows, sent))
        return sent

    def _finish_send(self, slot: _Slot, rows: Tensors, sent: Sent) -> None:
        try:
            slot.copied.synchronize()
            for work in [dist.isend(t, dst=self._next, group=self._group) for t in rows.values()]:
                work.wait()
        except RuntimeError as error:
            sent.finish(error)
        else:
            sent.finish()

    @staticmethod
    def _send_in_order(work: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            work.get()()

    def take_waiting(self) -> tuple[float, int]:
        """Seconds waited for the previous stage and bytes received since the last call."""
        taken = (self._waited_s, self._received_bytes)
        self._waited_s, self._received_bytes = 0.0, 0
        return taken

    def _wait(self, work: dist.Work) -> None:
        start = time.perf_counter()
        work.wait()
        self._waited_s += time.perf_counter() - start

    def irecv(self) -> tuple[Tensors, list[Receiving], list[Callable[[], None]]]:
        """Start receiving this step's rows from the previous stage.

        Returns:
            The tensors, [capacity, …] on this rank's device, of which the step's rows are valid
            once all handles have been waited for and then all callbacks have been called.

        """
        assert self._previous is not None
        if self._device.type == "cpu":
            return self._received, self._recv_into(self._received), []
        slot = self._incoming[self._steps % self._depth]
        slot.copied.synchronize()
        rows = self._rows

        def to_device() -> None:
            for name in self._order:
                self._received[name][:rows].copy_(slot.host[name][:rows], non_blocking=True)
            slot.copied.record()

        return self._received, self._recv_into(slot.host), [to_device]

    def _recv_into(self, buffers: Tensors) -> list[Receiving]:
        rows = [buffers[name][: self._rows] for name in self._order]
        self._received_bytes += sum(tensor.nbytes for tensor in rows)
        return [
            Receiving(self, dist.irecv(tensor, src=self._previous, group=self._group))
            for tensor in rows
        ]


class _HostSends(Sent):
    """Sends straight from a CPU rank's tensors, which it keeps alive."""

    def __init__(self, works: list[dist.Work], tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._works = works
        self._tensors = tensors

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()

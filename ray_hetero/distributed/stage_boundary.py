"""Tensor exchange between pipeline stages, through host memory.

Both sides of a stage boundary know the number of tokens of a step from the scheduler's output, so
nothing but one message of the step's rows crosses it, by the best link that two ranks have
(`link.py`).  The memory of messages is allocated once.  A GPU rank packs the rows on its device and
copies them from, or to, page-locked memory in one piece; a CPU rank reads its tensors where they
have arrived.  Rows that the next stage's GPU has computed for a CPU rank stay there
(`offload.prefill.stage_output`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from ray_hetero.distributed.exchanged import Exchanged
from ray_hetero.distributed.link import Link, Receiver, Sender, Terms
from ray_hetero.distributed.linking import LINKS, Linking, Signature
from ray_hetero.distributed.messages import Message, OnItsWay, Packing, Tensors
from ray_hetero.distributed.neighbour import Neighbours
from ray_hetero.distributed.sending_thread import SendingThread
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.step_route import StepRoute
from ray_hetero.log import logger
from ray_hetero.offload.prefill.stage_output import SeenOutput, StageOutput
from ray_hetero.runtime.stream_words import CurrentStream, StreamWords, words_of


class Staging:
    """The device's side of a GPU rank's messages in one direction, for up to `capacity` tokens."""

    def __init__(self, packing: Packing, capacity: int, device: torch.device) -> None:
        self.rows = torch.zeros((capacity, packing.row_bytes), dtype=torch.uint8, device=device)
        self.tensors = packing.views(self.rows)


class Receiving:
    """A message on its way here; vLLM waits for it where it first needs the tensors."""

    def __init__(self, boundary: StageBoundary, way: OnItsWay, message: Message) -> None:
        self._boundary = boundary
        self._way = way
        self.message = message
        """Message on its way."""

    def wait(self) -> None:
        """Wait for the message; the boundary adds the time up."""
        start = time.perf_counter()
        self._way.wait()
        self._boundary.arrived(self.message, start, time.perf_counter())


class StageBoundary:
    """Sends a pipeline stage's output to the next stage and receives the previous one's.

    Args:
        neighbours: the ranks of other stages that this rank exchanges with.
        device: where this rank computes.
        links: links that may be used, in the order in which they are tried.

    """

    def __init__(
        self, neighbours: Neighbours, device: torch.device, *, links: Sequence[Link] = LINKS
    ) -> None:
        self._neighbours = neighbours
        self._device = device
        self._links = links
        self._names = frozenset[str]()
        """Names of the tensors that cross."""
        self._rows = 0
        self._exchanged = Exchanged()
        self._is_clock_shared = False
        self._computed_at = 0.0
        self._senders: list[Sender] = []
        self._receiver: Receiver | None = None
        self._copied = defaultdict[int, torch.cuda.Event](torch.cuda.Event)
        self._staging_in: Staging | None = None
        self._staging_out: Staging | None = None
        self._sending: SendingThread | None = None
        self._output: StageOutput | None = None
        self._seen: SeenOutput | None = None
        self._begun: Message | None = None
        """Message of the running step, whose sender waits until this rank leaves its GPU."""
        self._words: StreamWords | None = None
        """Words by which the current stream waits for messages; None where it cannot."""
        self._is_decoding = False
        self._coming: Receiving | None = None
        """Message of the running step for which the stream waits, and this thread not yet."""

    def agree(
        self,
        template: Mapping[str, torch.Tensor],
        capacity: int,
        timeout_s: float = 600,
        numa_nodes: tuple[int, ...] = (),
        output: StageOutput | None = None,
    ) -> None:
        """Agree with the neighbours on what crosses, and allocate all memory.

        Args:
            template: the model's intermediate tensors, [tokens, …] each.
            capacity: most tokens of one step.
            timeout_s: longest wait for another rank, now and in each step (exchange.timeout_s).
            numa_nodes: of a CPU rank.
            output: memory of a GPU in which this CPU stage leaves results, if it leaves some there.

        Raises:
            AgreementError: a neighbour sends or takes other tensors than this rank, or there is no
                link to it.
            RuntimeError: a neighbour is late, or has ended.

        """
        self._names = frozenset(template)
        packing = Packing(template)
        terms = Terms(
            packing, capacity, self._neighbours.stages, timeout_s, self._device, numa_nodes
        )
        linking = Linking(Signature.of(template, capacity), terms, self._links)
        if len(self._neighbours.following) == 1 and not self._is_gpu:
            self._output = output
        self._senders = [
            linking.to_next(next_, self._output) for next_ in self._neighbours.following
        ]
        if self._senders and self._is_gpu:
            self._staging_out = Staging(packing, capacity, self._device)
            self._sending = SendingThread(timeout_s)
        if self._neighbours.previous is not None:
            incoming = linking.to_previous(self._neighbours.previous, self._wait_until_read)
            self._receiver, self._is_clock_shared = incoming.receiver, incoming.is_clock_shared
            self._seen = incoming.gpu
            if self._is_gpu:
                self._staging_in = Staging(packing, capacity, self._device)
                self._words = self._words_of(incoming.receiver.first)

    @property
    def _is_gpu(self) -> bool:
        return bool(self._device.type != "cpu")

    def _wait_until_read(self, message: Message) -> None:
        """Wait until a GPU has copied what came; a CPU computes with it before its next step."""
        if self._is_gpu:
            self._copied[id(message)].synchronize()

    def _words_of(self, first: Message | None) -> StreamWords | None:
        """Words about messages, of which this is the first; None where a stream waits for none."""
        if first is None:
            return None
        stream = CurrentStream(self._device)
        try:
            return words_of(self._device, stream, first.complete_address)
        except UnsupportedError as error:
            logger.info("this rank waits itself for the stage before: %s", error)
            return None

    def begin_step(self, route: StepRoute) -> None:
        """Learn how many tokens the next step has, which are the rows that cross this boundary.

        The rows of a decode step come through the host's memory, wherever the stage before has
        computed them.

        Args:
            route: of the step.

        """
        self._rows, self._is_decoding = route.tokens, route.is_decoding

    def isend(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Start sending this step's rows to the next stage; tensors are [at least rows, …].

        The caller may drop or overwrite the tensors at once: on a CPU they have been copied, on a
        GPU later kernels run behind the copy on the same stream.

        Raises:
            RuntimeError: a receiver is late, or has ended, or an earlier step was not sent, or
                there are tensors for which nothing was agreed.

        """
        start = time.perf_counter()
        if self._senders and (unknown := tensors.keys() - self._names):
            raise RuntimeError(
                f"the model of this stage sends {', '.join(sorted(unknown))} to the next one, for "
                f"which its make_empty_intermediate_tensors has no place: it has "
                f"{', '.join(sorted(self._names))}. Without them tokens would be wrong; write a "
                "layout of one stage"
            )
        if self._staging_out is not None:
            self._put(tensors, self._staging_out.tensors)
        for sender, receiver in zip(self._senders, self._neighbours.following, strict=True):
            message = sender.next_message()
            message.wait_until_sent()
            if self._staging_out is None:
                message.sent = self._send_here(sender, message, tensors, start)
            else:
                message.sent = self._send_staged(sender, message, receiver.rank)
            self._exchanged.sent_bytes += message.of(self._rows).nbytes
        self._exchanged.exchange_s += time.perf_counter() - start
        if self._output is not None:
            self._output.settle()
            self._exchanged.waiting_s += self._output.take_waited()

    def _put(self, tensors: Mapping[str, torch.Tensor | None], places: Tensors) -> None:
        """Copy a step's rows to their places."""
        for name, place in places.items():
            tensor = tensors[name]
            if tensor is None:
                # MiniCPM's layers leave no residual: the next stage adds nothing then.
                place[: self._rows].zero_()
            else:
                place[: self._rows].copy_(tensor[: self._rows])

    def _send_here(
        self, sender: Sender, message: Message, tensors: Mapping[str, torch.Tensor], start: float
    ) -> OnItsWay:
        message.is_on_gpu = self._output is not None and self._output.holds(tensors)
        if message.is_on_gpu:
            assert self._output is not None
            message.awaited = self._output.number
            self._output.sent(message)
        else:
            self._put(tensors, message.tensors)
        message.computed_at = start
        return sender.send(message, self._rows)

    def _send_staged(self, sender: Sender, message: Message, rank: int) -> OnItsWay:
        assert self._staging_out is not None
        assert self._sending is not None
        rows = self._rows
        message.rows[:rows].copy_(self._staging_out.rows[:rows], non_blocking=True)
        self._copied[id(message)].record()
        return self._sending.put(
            lambda: self._finish_send(sender, message, rows),
            f"a step of {rows} tokens to rank {rank}",
        )

    def _finish_send(self, sender: Sender, message: Message, rows: int) -> None:
        self._copied[id(message)].synchronize()
        message.computed_at = self._computed_at = time.perf_counter()
        sender.send(message, rows).wait()

    def irecv(self) -> tuple[Tensors, list[Receiving], list[Callable[[], None]]]:
        """Start receiving this step's rows from the previous stage.

        Returns:
            The tensors, [capacity, …] on this rank's device, of which the step's rows are valid
            once the handle has been waited for and then the callback has been called.

        """
        assert self._receiver is not None
        message, way = self._receiver.receive(self._rows)
        self._exchanged.received_bytes += message.of(self._rows).nbytes
        receiving = Receiving(self, way, message)
        if self._staging_in is None:
            return message.tensors, [receiving], []
        rows = self._rows
        if self._words is None or not self._is_decoding:
            return self._staging_in.tensors, [receiving], [lambda: self._to_device(message, rows)]
        return self._staging_in.tensors, [], [lambda: self._behind(receiving, rows)]

    def _behind(self, receiving: Receiving, rows: int) -> None:
        """Make the stream wait for a message: the step can be submitted before it is there."""
        assert self._words is not None
        message = receiving.message
        self._words.wait(message.complete_address, message.number)
        self._to_device(message, rows, is_there=False)
        self._coming = receiving

    def _to_device(self, message: Message, rows: int, *, is_there: bool = True) -> None:
        assert self._staging_in is not None
        start = time.perf_counter()
        into = self._staging_in.rows[:rows]
        if is_there and message.is_on_gpu:
            self._from_gpu(message, into)
        else:
            into.copy_(message.rows[:rows], non_blocking=True)
            self._copied[id(message)].record()
        self._exchanged.exchange_s += time.perf_counter() - start

    def _from_gpu(self, message: Message, into: torch.Tensor) -> None:
        """Copy rows that the sender has left on this GPU, or has begun to compute there."""
        assert self._seen is not None
        words = None
        if message.awaited:
            words = self._seen.words
            assert words is not None  # the sender was told so
            words.wait(message.awaited)
        into.copy_(self._seen.rows.view(-1, into.shape[1])[: len(into)], non_blocking=True)
        self._copied[id(message)].record()
        if words is not None:
            words.say(message.awaited)
            self._begun = message
        else:
            # The sender has one such place, and is told nothing else of this copy.
            self._copied[id(message)].synchronize()
            message.take()

    def end_step(self) -> None:
        """Leave the GPU to the stage before this one, behind what has been ordered of the step.

        Where its stream waits for the step's message, wait for it too: for as long as any other.

        Raises:
            RuntimeError: the other stage is late, or has ended, or has left the rows on the GPU.

        """
        coming, self._coming = self._coming, None
        if coming is not None:
            try:
                coming.wait()
            except RuntimeError:
                # Nothing of this step counts; a stream that waits for ever would outlive it.
                coming.message.complete()
                raise
            if coming.message.is_on_gpu:
                raise RuntimeError(
                    "the stage before has left the rows of a decode step on the GPU, and this one "
                    "has read them in the host's memory"
                )
        message, self._begun = self._begun, None
        if message is not None:
            assert self._seen is not None
            assert self._seen.words is not None
            self._seen.words.tell(message.done_address, message.awaited)

    def arrived(self, message: Message, start: float, end: float) -> None:
        """A message was waited for from `start` to `end`, in seconds of this rank's clock."""
        computed = end
        if self._is_clock_shared:
            computed = min(max(start, message.computed_at), end)
        self._exchanged.waiting_s += computed - start
        self._exchanged.exchange_s += end - computed

    def take(self) -> Exchanged:
        """Sums of exchanges since the last call."""
        taken, self._exchanged = self._exchanged, Exchanged()
        return taken

    @property
    def computed_at(self) -> float:
        """When a GPU had computed what was last sent, on this rank's clock; 0 on a CPU rank."""
        return self._computed_at

"""Results of a CPU stage's prompts that stay on the GPU that has computed them.

The stage behind often computes on the same GPU.  Hidden states and residuals of 8,192 tokens of an
8B model are 134 MB: down over the link, into a message and up again they take longer than a
layer of the model.  Here they stay in memory that both ranks see, and the message only says so
(distributed/stage_boundary.py).

That is done once a step has shown that what the layers return is what is sent: a model might do
more with it.

Words behind the rows say when they are there, and when they have been read.  Streams of both ranks
wait for these, so that the message is sent, and the next stage's work ordered, while the GPU still
computes the rows.  Where a driver refuses that, both ranks wait themselves.

In larger steps the two stages take turns on their GPU (`turns_from`).  The sending rank waits in
its own thread: with streams that waited, the GPU computed less than without turns.  In smaller
steps, in which the GPU waits for weights, the message goes as soon as all of the stage's work is
submitted: the next stage submits its own meanwhile, and keys and values that are still to come are
written into the cache behind the message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels import step_trace
from ray_hetero.kernels.step_trace import Event
from ray_hetero.log import logger
from ray_hetero.offload.weights.link_reader import current
from ray_hetero.runtime import gpu_memory
from ray_hetero.runtime.stream_words import VALUES, CurrentStream, words_of

if TYPE_CHECKING:
    from ray_hetero.offload.prefill.offload_gpu import OffloadGpu


SHARE = 0.65
"""Share of the tokens whose products take as long as their weights on the link, from which turns
are taken.  An estimate from timelines of 8,192 tokens on an H100, whose layers took 101 ms and
their weights 97: two stages at once take some 7 % longer than one after the other, which takes no
longer than the link if an eighth of the weights comes in the other's turn and layers take 0.77 of
the link's time.  They take 1.2 times that of their products."""


def turns_from(gpu: OffloadGpu) -> int:
    """Tokens of a step from which the GPU's stages take turns; measured.

    Args:
        gpu: that computes nothing meanwhile.

    Raises:
        RuntimeError: what CUDA says.

    """
    gpu.settle()
    with torch.inference_mode(), current(gpu.computing):
        x = gpu.memory.to_multiply(gpu.tokens, gpu.reader.largest.inputs)
        # Not torch's own: the ranks of a group are to sample the same tokens later.
        x.normal_(generator=torch.Generator(gpu.device).manual_seed(0))

        def multiply(weight: torch.Tensor) -> None:
            torch.mm(x, weight.t(), out=gpu.memory.products(gpu.tokens, len(weight)))

        link, products = gpu.reader.seconds(multiply)
    tokens = int(SHARE * gpu.tokens * link / products)
    logger.info(
        "the next stage computes on the same GPU: steps of %d tokens and more take turns there "
        "(a piece of weights takes %.2f ms over the link, and products of %d tokens with it "
        "%.2f ms)",
        tokens,
        1e3 * link,
        gpu.tokens,
        1e3 * products,
    )
    return tokens


HIDDEN, RESIDUAL = "hidden_states", "residual"
"""Names of both results in vLLM's models, between stages."""
WORD_BYTES = 64
"""Bytes for each of the two words behind the rows."""
NAP_S = 1e-4
"""Seconds between two looks whether the next stage has computed a step."""


class RowPacking(Protocol):
    """How the tensors of a token lie in a row of a message."""

    row_bytes: int

    @property
    def names(self) -> set[str]:
        """Names of the tensors."""

    def views(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors inside of rows, uint8, [tokens, row_bytes]; views of [tokens, …], by name."""


class Carrier(Protocol):
    """A message that says that its rows lie here."""

    @property
    def is_taken(self) -> bool:
        """Whether the receiving rank has read them."""

    @property
    def done(self) -> int:
        """Number of the last of its steps that the receiving rank has computed."""


@dataclass(frozen=True)
class GpuOffer:
    """Memory of a GPU that a sending rank puts messages' rows in."""

    gpu: str
    """See `gpu_memory.identity`."""
    handle: bytes
    nbytes: int


class Words:
    """One end of the two words behind rows: it writes one of them and waits for the other.

    Args:
        memory: of the rows and the words, uint8.
        is_sender: whether this end writes that rows are there, and waits for their being read; the
            other end does the reverse.
        device: the GPU.
        stream: writes and waits.

    Raises:
        UnsupportedError: the GPU's driver refuses that.

    """

    def __init__(
        self, memory: torch.Tensor, device: torch.device, stream: Any, *, is_sender: bool
    ) -> None:
        end = memory.data_ptr() + memory.nbytes
        there, read = end - 2 * WORD_BYTES, end - WORD_BYTES
        self._own, self._other = (there, read) if is_sender else (read, there)
        self._names = ("there", "read") if is_sender else ("read", "there")
        """Names of the words that this end writes and waits for, in traces."""
        self._stream = words_of(device, stream, self._own)

    def say(self, number: int) -> None:
        """Write the number of a step where the stream comes to it.

        Raises:
            RuntimeError: CUDA's driver refuses it.

        """
        step_trace.note(Event.WORD, "write", self._names[0], number)
        self._stream.write(self._own, number % VALUES)

    def tell(self, address: int, number: int) -> None:
        """Write the number of a step to another word, of locked memory of the host, as `say` does.

        Raises:
            RuntimeError: as `say`.

        """
        step_trace.note(Event.WORD, "write", "computed", number)
        self._stream.write(address, number % VALUES)

    def wait(self, number: int) -> None:
        """Make the stream wait until the other end has reached a step, by its number.

        Raises:
            RuntimeError: as `say`.

        """
        step_trace.note(Event.WORD, "wait", self._names[1], number)
        self._stream.wait(self._other, number % VALUES)


class StageOutput:
    """Memory in which a stage's last layers leave the results of steps that a GPU computes.

    Args:
        gpu: that computes them.

    """

    def __init__(self, gpu: OffloadGpu) -> None:
        self._gpu = gpu
        self._memory: torch.Tensor | None = None
        self._places: Mapping[str, torch.Tensor] = {}
        self._carried: Carrier | None = None
        self._returned: tuple[int, int] | None = None
        self._stays = self._is_direct = False
        self._words: Words | None = None
        self._turns_from = 0
        """Tokens of a step from which it waits for its turn."""
        self._timeout_s = self._waited_s = 0.0
        self._is_awaited = False
        """Whether what the last message has said would be there is still to be waited for."""
        self._behind: Callable[[], None] | None = None
        """Work of a step that is left to do behind its message."""
        self.number = 0
        """Number of the last step whose rows are, or will be, here; 0 where this rank has waited
        for them before its message."""

    # --- the stage boundary's side ------------------------------------------------------------

    def offer(self, packing: RowPacking, capacity: int) -> GpuOffer | None:
        """Take the memory; None where the GPU gives none, or other tensors are sent.

        Args:
            packing: of the messages.
            capacity: most tokens of one.

        """
        if packing.names != {HIDDEN, RESIDUAL}:
            return None
        rows = capacity * packing.row_bytes
        nbytes = rows + 2 * WORD_BYTES
        try:
            memory, handle = gpu_memory.made(self._gpu.device, nbytes)
        except (OSError, RuntimeError) as error:
            logger.warning("results of prompts are sent through the host's memory: %s", error)
            return None
        self._memory = memory
        self._places = packing.views(memory[:rows].view(capacity, packing.row_bytes))
        return GpuOffer(gpu_memory.identity(self._gpu.device), handle, nbytes)

    def accepted(self, *, is_seen: bool, waits: bool = False, timeout_s: float = 600) -> None:
        """Keep the memory if the receiving rank sees it.

        Args:
            is_seen: whether it does.
            waits: whether its streams wait for words.
            timeout_s: longest wait for a step of the receiving rank (exchange.timeout_s).

        """
        self._timeout_s = timeout_s
        if self._memory is None:
            return
        if not is_seen:
            self._places = {}
            gpu_memory.give_back(self._memory)
            self._memory = None
        elif waits:
            gpu = self._gpu
            try:
                self._words = Words(self._memory, gpu.device, gpu.computing, is_sender=True)
                self._turns_from = turns_from(gpu)
            except UnsupportedError as error:
                logger.info("the next stage is told of prompts once they are computed: %s", error)

    def holds(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether the rows of a step that is sent lie here; called once for each step.

        Raises:
            RuntimeError: they do, and are not what is sent.

        """
        given = (tensors.get(name) for name in (HIDDEN, RESIDUAL))
        sent = tuple(0 if tensor is None else tensor.data_ptr() for tensor in given)
        is_direct = self._returned == sent
        stays, self._stays = self._stays, False
        if stays and not is_direct:
            raise RuntimeError(
                "this stage sends tensors that its last layers have not returned, although their "
                "results are on a GPU; expected the tensors of earlier steps. Set "
                "cpu.prefill_on_gpu to false, and report the model's class."
            )
        step_trace.note(Event.MESSAGE, "stage", "rows stay" if stays else "rows sent")
        self._is_direct |= is_direct
        self._returned = None
        return stays

    def sent(self, message: Carrier) -> None:
        """Keep the memory until the receiving rank has read it by this message."""
        self._carried = message

    def settle(self) -> None:
        """Do what is left of the step, behind its message, and wait for what that says is there.

        Raises:
            RuntimeError: what CUDA says.
            TimeoutError: keys and values of the step do not come.

        """
        behind, self._behind = self._behind, None
        if behind is not None:
            behind()
        if self._is_awaited:
            self._is_awaited = False
            self._gpu.wait()

    def take_waited(self) -> float:
        """Seconds that steps have waited for their turns since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    # --- the layers' side ---------------------------------------------------------------------

    def may_take(self, tokens: int) -> bool:
        """Whether a step's results can stay here."""
        return (
            self._is_direct
            and bool(self._places)
            and tokens <= len(self._places[HIDDEN])
            and (self._words is not None or self._carried is None or self._carried.is_taken)
        )

    def goes_ahead(self, tokens: int) -> bool:
        """Whether a step's message goes once everything is ordered.

        Args:
            tokens: of the step that the GPU computes.

        """
        return self._words is not None and tokens < self._turns_from

    def has_turn(self, tokens: int) -> bool:
        """Whether a step need not wait until the next stage has computed the one before.

        Args:
            tokens: of the step that the GPU computes.

        """
        carried = self._carried
        return (
            self._words is None
            or tokens < self._turns_from
            or carried is None
            or carried.done == self.number % VALUES
        )

    def wait_for_turn(self, tokens: int) -> None:
        """Wait until `has_turn`, whose argument this has.

        Raises:
            TimeoutError: the next stage takes too long.

        """
        began = time.monotonic()
        while not self.has_turn(tokens):
            if time.monotonic() - began > self._timeout_s:
                raise TimeoutError(
                    f"the next stage has not computed step {self.number} of prompts on the GPU of "
                    f"both stages in {self._timeout_s:g} s (exchange.timeout_s)"
                )
            time.sleep(NAP_S)
        self._waited_s += time.monotonic() - began

    def put(
        self, tokens: int, rows: torch.Tensor | slice, x: torch.Tensor, total: torch.Tensor
    ) -> None:
        """Put some rows here, behind what the GPU is computing, as `StageRows` says."""
        with current(self._gpu.computing):
            if self._words is not None:
                # The receiving rank has read the step before.
                self._words.wait(self.number)
            for name, result in ((HIDDEN, x), (RESIDUAL, total)):
                self._places[name][:tokens][rows] = result.to(self._gpu.device)

    def finish(
        self, hidden: torch.Tensor, behind: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Placeholder tensors for the rows, which stay on the GPU, as `StageRows` says.

        Waits for them, or has the word written when they are there.
        """
        self._behind = behind
        if self._words is None:
            self._gpu.wait()
        else:
            self.number += 1
            self._is_awaited = True
            self._words.say(self.number)
        self._stays = True
        x, total = (
            torch.empty_like(hidden, memory_format=torch.contiguous_format) for _ in range(2)
        )
        self.note(x, total)
        return x, total

    def note(self, x: torch.Tensor, total: torch.Tensor) -> None:
        """Note the placeholders that the last layers return for a step."""
        self._returned = x.data_ptr(), total.data_ptr()


class SeenOutput:
    """A stage's output in the rank that receives it.

    Args:
        memory: that the sending rank has offered, uint8.
        device: the GPU.

    """

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self.rows = memory[: -2 * WORD_BYTES]
        """uint8, [bytes of all rows]."""
        self.words: Words | None = None
        """Words about the rows, for the current stream; None where that cannot wait for any."""
        try:
            self.words = Words(memory, device, CurrentStream(device), is_sender=False)
        except UnsupportedError as error:
            logger.info("this rank waits itself for prompts of the stage before: %s", error)


def accept(offer: GpuOffer, device: torch.device) -> SeenOutput | None:
    """The offered memory in the receiving rank; None where that computes on another GPU.

    Args:
        offer: of the sending rank.
        device: where this rank computes.

    """
    if gpu_memory.identity(device) != offer.gpu:
        return None
    try:
        return SeenOutput(gpu_memory.opened(device, offer.handle, offer.nbytes), device)
    except (OSError, RuntimeError) as error:
        logger.info("results of prompts are received through the host's memory: %s", error)
        return None

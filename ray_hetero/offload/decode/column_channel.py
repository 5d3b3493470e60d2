"""Memory by which the cores of a rank get the last columns of MLPs from a GPU.

The cores ask by a word for the columns of a layer, and wait for another word behind which these are
(csrc/kernels/column_share.h).  Where the GPU has all columns, it may compute outputs of the MLP
from them too, with a word of their own.  Words count layers, and each step begins with another
number than the one before, so that nothing has to be taken back between two steps.  There are only
a few such numbers: work that waits for these words can be captured once for each (step_graphs.py).
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ray_hetero.kernels import step_trace
from ray_hetero.kernels.formats.base import BLOCK
from ray_hetero.kernels.layers.layer_parts import CpuBlocks
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.kernels.step_trace import Event
from ray_hetero.offload.decode.column_pieces import inner_of
from ray_hetero.planning.prefill_memory import BF16_BYTES, SHARED_TOKENS
from ray_hetero.runtime.stream_words import VALUES

if TYPE_CHECKING:
    from ray_hetero.kernels.layers.layer import Layer
    from ray_hetero.kernels.layers.layer_parts import CpuBlocks


LINE_BYTES = 64
"""Bytes of a cache line, at whose beginnings the words are."""
WAIT_S = 60.0
"""Longest wait of the cores for the columns of a layer, in seconds; they take milliseconds."""
WORDS_BYTES = 5 * LINE_BYTES
"""Bytes of `ColumnShare.Words`, and of one more line by which the first rank of a group says
whether the GPU has a part of a step."""
FAILED, OUT_OF_MEMORY = 1, 2
"""Values of the word that says that no more columns will come, and why."""
PHASES = 3
"""Numbers that steps begin with, one after the other.  With two, a word of one step would be as far
ahead of those of the next one as behind: the least difference that tells has half of all values."""
PHASE = VALUES // PHASES
"""Difference between two of these numbers, many times the layers of a step."""


@dataclass(frozen=True)
class ColumnMemory:
    """Memory by which a rank gets columns from a GPU."""

    words: torch.Tensor
    """[5 cache lines], uint8, 0: `ColumnShare.Words` of the native module, and a line more."""
    columns: torch.Tensor
    """[most tokens · the rank's columns], bf16."""

    @staticmethod
    def bytes_of(inner: int) -> int:
        """Bytes of both in one piece of memory, of a rank with so many columns."""
        return WORDS_BYTES + BF16_BYTES * SHARED_TOKENS * inner

    @classmethod
    def within(cls, memory: torch.Tensor, inner: int) -> ColumnMemory:
        """Both in one piece of memory, uint8."""
        columns = memory[WORDS_BYTES : cls.bytes_of(inner)]
        return cls(memory[:WORDS_BYTES], columns.view(torch.bfloat16))

    @property
    def asked(self) -> int:
        """Address of the word that counts layers that were asked for."""
        return int(self.words.data_ptr())

    @property
    def answered(self) -> int:
        """Address of the word that counts layers whose columns are there."""
        return self.asked + LINE_BYTES

    @property
    def failed(self) -> int:
        """Address of the word that says that no more will come."""
        return self.answered + LINE_BYTES

    @property
    def projected(self) -> int:
        """Address of the word that counts layers whose outputs are there."""
        return self.failed + LINE_BYTES

    @property
    def said(self) -> int:
        """Address of twice the number of steps that were decided on, and 1 if the GPU has a part
        of the last one.

        The number that this rank has heard of is behind it.
        """
        return self.projected + LINE_BYTES

    def say(self, *, takes_part: bool) -> None:
        """Tell this rank, in the first one, whether the GPU has a part of the next step."""
        step_trace.note(Event.MESSAGE, "first rank", "takes part" if takes_part else "takes none")
        said = ctypes.c_uint32.from_address(self.said)
        said.value = (said.value // 2 + 1) * 2 + takes_part

    def hear(self) -> bool | None:
        """Hear, in this rank, whether the GPU has a part of the next step; None if nobody has said.

        The numbers go round.
        """
        said = ctypes.c_uint32.from_address(self.said)
        heard = ctypes.c_uint32.from_address(self.said + ctypes.sizeof(said))
        now = said.value
        if now // 2 == heard.value:
            return None
        heard.value = now // 2
        return bool(now % 2)


class ColumnChannel(ABC):
    """Channel by which native decode steps receive the last columns of a rank's MLPs.

    The GPU that computes them is this rank's (mlp_columns.py), or that of the first rank of its
    group.

    Args:
        layers: of a step.
        inner: columns of the rank's MLPs.
        kernel: what computes the other ones.
        memory: of this rank.
        inputs: [most tokens · hidden], bf16, where the cores leave what the gate multiplies.
        outputs: the same, where the GPU leaves outputs of the MLP; None where it computes none.

    """

    def __init__(
        self, layers: int, inner: int, kernel: StreamingLinear, memory: ColumnMemory,
        inputs: torch.Tensor, outputs: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._layers, self._inner = layers, inner
        # Kept: the cores, and a GPU, know them by their addresses.
        self._own, self._inputs, self._outputs = memory, inputs, outputs
        self.native = kernel.native.ColumnShare(
            words=memory.words.data_ptr(), inputs=inputs.data_ptr(),
            columns=memory.columns.data_ptr(), limit_s=WAIT_S,
            outputs=0 if outputs is None else outputs.data_ptr(),
        )  # fmt: skip
        """Memory by which the cores hand tokens over, and get columns."""
        self.steps = 0
        """Steps up to now."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Most tokens of a step; on all ranks of a group the same."""

    @property
    @abstractmethod
    def about(self) -> str:
        """The GPU and what it has room for; empty on the other ranks of a group."""

    @abstractmethod
    def of_step(self, tokens: int, kept: CpuBlocks) -> AbstractContextManager[None]:
        """Let the GPU compute its part of a step while the cores compute theirs within this.

        Args:
            tokens: of the step.
            kept: blocks that the cores of each rank compute.

        Raises:
            torch.OutOfMemoryError: the GPU's memory has run out, on all ranks.
            RuntimeError: what else CUDA says; in other ranks, that the first one has failed.
            TimeoutError: ordering the GPU's work takes too long.

        """

    @abstractmethod
    def fetch(self, tokens: int, kept: CpuBlocks, *, is_ahead: bool = False) -> float:
        """Prefetch weights of a step; arguments are those of `of_step`.

        Args:
            tokens: of the step.
            kept: blocks that the cores of each rank compute.
            is_ahead: whether the step, to which other ranks come, learns that memory has run out.

        Returns:
            Seconds until they are there; 0 also where `of_step` has them come itself, and in other
            ranks than the first one, which fetches.

        Raises:
            RuntimeError: what CUDA says.
            TimeoutError: ordering the GPU's work takes too long.

        """

    @abstractmethod
    def prepare(self, tokens: int, kept: CpuBlocks) -> None:
        """Capture graphs of steps like the last one; arguments and errors are those of `fetch`."""

    @property
    def blocks(self) -> int:
        """Blocks of 32 columns of a rank's MLP, of which its cores compute some, and not all."""
        return self._inner // BLOCK

    @property
    def output_blocks(self) -> int:
        """Blocks of 32 outputs of an MLP, of which the cores may compute some; 0 if only all."""
        return 0 if self._outputs is None else self._outputs.numel() // SHARED_TOKENS // BLOCK

    @property
    def first(self) -> int:
        """Layers that will count as asked for before the next step, the same on all ranks."""
        return (ctypes.c_uint32.from_address(self._own.asked).value // PHASE + 1) % PHASES * PHASE

    def begin(self) -> int:
        """Begin a step; the `first` of it."""
        first = self.first
        ctypes.c_uint32.from_address(self._own.asked).value = first
        # Steps without outputs of a GPU leave it behind.
        ctypes.c_uint32.from_address(self._own.projected).value = first
        return first

    def agreed(self, *, takes_part: bool) -> bool:
        """Decide whether the GPU has a part of the next step, as the first rank of a group says.

        Args:
            takes_part: whether it is to have one; without a group that decides.

        """
        return takes_part

    def end(self, first: int) -> None:
        """Count all layers of a step as asked for, where it has failed too.

        Args:
            first: what `begin` has given.

        """
        ctypes.c_uint32.from_address(self._own.asked).value = first + self._layers
        self.steps += 1


FIRST_RANK = "on the first rank of this group"
"""Place of what fails in the GPU's work, for messages."""


class MlpColumnClient(ColumnChannel):
    """The last columns of this rank's parts of the MLPs of layers that follow one another.

    Args:
        layers: with this rank's parts of the weights.
        kernel: what computes the other columns.
        memory: of this rank.
        tokens: most of a step.

    """

    def __init__(
        self, layers: Sequence[Layer], kernel: StreamingLinear, memory: ColumnMemory, tokens: int
    ) -> None:
        self._tokens = min(SHARED_TOKENS, tokens)
        parts = layers[0].parts
        inputs = torch.empty(SHARED_TOKENS * parts.norm.weight.shape[0], dtype=torch.bfloat16)
        super().__init__(len(layers), inner_of(parts), kernel, memory, inputs)

    @property
    def tokens(self) -> int:
        """Most tokens of a step that is shared."""
        return self._tokens

    @property
    def about(self) -> str:
        """Empty: the first rank has the GPU."""
        return ""

    def prepare(self, tokens: int, kept: CpuBlocks) -> None:
        """Do nothing: the first rank has the GPU's work ordered."""

    def fetch(self, tokens: int, kept: CpuBlocks, *, is_ahead: bool = False) -> float:
        """Fetch nothing: the first rank does, and knows how long that takes."""
        return 0.0

    def agreed(self, *, takes_part: bool) -> bool:
        """Wait until the first rank says whether the GPU has a part of the next step.

        Raises:
            torch.OutOfMemoryError: the GPU's memory has run out, on all ranks.
            RuntimeError: something else has failed in the first rank.
            torch.distributed.DistError: the first rank is late.

        """
        end = time.monotonic() + WAIT_S
        while (said := self._own.hear()) is None:
            why = ctypes.c_uint32.from_address(self._own.failed).value
            if why == OUT_OF_MEMORY:
                raise torch.OutOfMemoryError(FIRST_RANK)
            if why:
                raise RuntimeError(f"the GPU's part of a decode step has failed {FIRST_RANK}")
            if time.monotonic() > end:
                raise dist.DistError(
                    "the first rank of this group has not said in "
                    f"{WAIT_S:g} s how a decode step is computed"
                )
            time.sleep(0)
        return said

    @contextmanager
    def of_step(self, tokens: int, kept: CpuBlocks) -> Iterator[None]:
        """Take the GPU's columns of a step that the cores compute within this."""
        first = self.begin()
        try:
            yield
        except RuntimeError:
            if ctypes.c_uint32.from_address(self._own.failed).value == OUT_OF_MEMORY:
                raise torch.OutOfMemoryError(FIRST_RANK) from None
            raise
        finally:
            self.end(first)


MakeColumns = Callable[[int], ColumnChannel | None]
"""Makes what computes columns of the first layers of a run, by their number; None where nothing
can.  The same on all ranks of a group."""


def no_columns(count: int) -> None:
    """Make nothing, as `MakeColumns`."""

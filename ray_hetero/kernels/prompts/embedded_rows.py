"""Rows of an embedding in host memory that is kept from step to step, and on a GPU.

Usually they are looked up in host memory, and sent.  Where a model hands them to its layers as they
are, and a GPU computes the layers, nobody reads them in host memory: the GPU looks them up itself
(gpu_table.py) while the step is prepared further, and this process looks up only what somebody is
about to read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ray_hetero.kernels.prompts.gpu_table import GpuTable
from ray_hetero.kernels.prompts.link_reader import current

SPAN = 1024
"""Rows of an embedding that are sent to the GPU at once, while the next ones are looked up."""


@dataclass(frozen=True)
class _LookedUp:
    """What was looked up last."""

    table: torch.Tensor
    tokens: torch.Tensor
    version: int
    """Count of changes of the host memory by then."""

    @property
    def elements(self) -> int:
        return int(self.tokens.numel() * self.table.shape[1])


class EmbeddedRows:
    """Rows of an embedding, looked up for one step after the other.

    Args:
        memory: of the host, [elements], bf16, all of its storage.
        there: memory of the GPU, of the same size, which other things use too; None if there is no
            GPU.

    """

    def __init__(self, memory: torch.Tensor, there: torch.Tensor | None = None) -> None:
        self._memory = memory
        # A tensor of inference mode does not count its changes.
        self._counts = not memory.is_inference()
        self._there = there if self._counts else None
        self._sent: tuple[int, int] | None = None
        """Elements on the GPU, and the count of changes of those in host memory by then."""
        self._table: GpuTable | None = None
        self._may_be_left = False
        self._are_handed_on: bool | None = None
        """Whether the layers got rows as they were looked up, each time; None before the first."""
        self._step: _LookedUp | None = None
        """Rows that the layers have not got yet."""
        self._left: _LookedUp | None = None
        """Rows that have not been looked up in host memory yet."""
        self._expected: torch.Tensor | None = None
        """Tokens whose rows the GPU looks up before the step asks for them."""

    def leave_to_readers(self, table: GpuTable | None) -> None:
        """Look rows up in host memory only for `fill`, once the layers are known to get all rows.

        Args:
            table: by which the GPU looks them up; None where this rank has no GPU.

        """
        self._table = table
        self._may_be_left = self._counts and (table is None) == (self._there is None)

    def expect(self, tokens: torch.Tensor, stream: Any) -> None:
        """Have the GPU look rows up that the next step is likely to ask for, if it does so at all.

        Args:
            tokens: int64.
            stream: of the GPU.

        Raises:
            RuntimeError: what CUDA says.

        """
        self.forget()
        if (
            self._table is None
            or self._there is None
            or not self._are_left(tokens, self._table.rows)
        ):
            return
        elements = tokens.numel() * self._table.columns
        if elements <= len(self._there):
            with current(stream):
                self._table(tokens, self._there[:elements].view(len(tokens), -1))
            self._expected = tokens

    def __call__(
        self, table: torch.Tensor, tokens: torch.Tensor, stream: Any = None
    ) -> torch.Tensor | None:
        """Look rows up, [tokens, N], which stay until others are; None where they do not suit.

        Args:
            table: [vocabulary, N].
            tokens: int64.
            stream: of the GPU, on which rows are sent while others are looked up; None sends none.

        Raises:
            IndexError: a token is none of the vocabulary.
            RuntimeError: what CUDA says.

        """
        expected = self._expected
        self.skip()
        elements = tokens.numel() * table.shape[1]
        is_plain = tokens.ndim == 1 and table.dtype == torch.bfloat16
        if not is_plain or elements > len(self._memory):
            return None
        into = self._memory[:elements].view(len(tokens), -1)
        sends = self._there is not None and stream is not None
        is_left = (sends or self._there is None) and self._are_left(tokens, len(table))
        if sends:
            assert self._there is not None
            there = self._there[:elements].view(into.shape)
            with current(stream):
                if is_left:
                    assert self._table is not None
                    if expected is None or not torch.equal(expected, tokens):
                        self._table(tokens, there)
                else:
                    spans = zip(*(each.split(SPAN) for each in (tokens, into, there)), strict=True)
                    for some, rows, rows_there in spans:
                        torch.index_select(table, 0, some, out=rows)
                        rows_there.copy_(rows, non_blocking=True)
            self._sent = elements, self._memory._version
        elif not is_left:
            torch.index_select(table, 0, tokens, out=into)
        if self._counts:
            self._step = _LookedUp(table, tokens, self._memory._version)
            self._left = self._step if is_left else None
        return into

    def _are_left(self, tokens: torch.Tensor, rows: int) -> bool:
        """Whether rows of an embedding of so many are looked up in host memory only later."""
        if not (self._may_be_left and self._are_handed_on and len(tokens)):
            return False
        least, most = (int(one) for one in tokens.aminmax())
        return least >= 0 and most < rows

    def skip(self) -> None:
        """Forget what was looked up last: the next step has other rows."""
        self._step = self._left = self._expected = None

    def meet(self, hidden: torch.Tensor) -> None:
        """Learn what the layers get in a step.

        Args:
            hidden: [tokens, N].

        Raises:
            RuntimeError: these are not the rows that were looked up, though nothing has come
                between before.

        """
        step, self._step = self._step, None
        if step is None:
            return
        are_same = self._are_those(hidden, step)
        if step is not self._left:
            self._are_handed_on = are_same and self._are_handed_on is not False
        elif not are_same:
            raise RuntimeError(
                "the rows of this model's embedding were changed before its layers got them, after "
                "steps in which they were not; please report the model, and set "
                "cpu.prefill_on_gpu to false meanwhile"
            )

    def _are_those(self, hidden: torch.Tensor, step: _LookedUp) -> bool:
        """Whether these are the rows that were looked up, as they were."""
        return (
            self.holds(hidden)
            and (hidden.storage_offset(), hidden.numel()) == (0, step.elements)
            and hidden.is_contiguous()
            and self._memory._version == step.version
        )

    def fill(self) -> None:
        """Look rows up in host memory that were left until somebody reads them.

        The caller has met the layers' input, and is the only one to read it until this ends.
        """
        left, self._left = self._left, None
        if left is None:
            return
        into = self._memory[: left.elements].view(len(left.tokens), -1)
        torch.index_select(left.table, 0, left.tokens, out=into)
        if self._sent is not None:
            self._sent = self._sent[0], self._memory._version

    def holds(self, x: torch.Tensor) -> bool:
        """Whether a tensor lies in this host memory."""
        own = self._memory.untyped_storage().data_ptr()
        return bool(x.untyped_storage().data_ptr() == own)

    def take(self, rows: torch.Tensor) -> torch.Tensor | None:
        """The same rows on the GPU, for the caller to overwrite; None where they are not the same.

        A model may have scaled what was looked up in place, or looked up others: torch counts both.

        Args:
            rows: [M, N], in any memory.

        """
        sent, self._sent = self._sent, None
        if self._there is None or sent is None or not self.holds(rows):
            return None
        elements, version = sent
        begin = rows.storage_offset()
        end = begin + rows.numel()
        if version != self._memory._version or end > elements or not rows.is_contiguous():
            return None
        return self._there[begin:end].view(rows.shape)

    def forget(self) -> None:
        """Have nothing on the GPU, whose memory is overwritten."""
        self._sent = self._expected = None

"""Rows of an embedding in host memory that is kept from step to step, and on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from ray_hetero.offload.weights.link_reader import current

SPAN = 1024
"""Rows of an embedding that are sent to the GPU at once, while the next ones are looked up."""


class EmbeddedRows:
    """Rows of an embedding, looked up for one step after the other.

    Args:
        memory: of the host, [elements], bf16, all of its storage; page-locked for a GPU.
        there: memory of the GPU, of the same size, which other things use too; None if there is no
            GPU.

    """

    def __init__(self, memory: torch.Tensor, there: torch.Tensor | None = None) -> None:
        self._memory = memory
        # A tensor of inference mode does not count its changes.
        self._there = None if memory.is_inference() else there
        self._sent: tuple[int, int] | None = None
        """Elements on the GPU, and the count of changes of those in host memory by then."""

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
            RuntimeError: an error of CUDA.

        """
        elements = tokens.numel() * table.shape[1]
        is_plain = tokens.ndim == 1 and table.dtype == torch.bfloat16
        if not is_plain or elements > len(self._memory):
            return None
        into = self._memory[:elements].view(len(tokens), -1)
        if self._there is None or stream is None:
            return torch.index_select(table, 0, tokens, out=into)
        there = self._there[:elements].view(into.shape)
        with current(stream):
            spans = zip(*(each.split(SPAN) for each in (tokens, into, there)), strict=True)
            for some, rows, rows_there in spans:
                torch.index_select(table, 0, some, out=rows)
                rows_there.copy_(rows, non_blocking=True)
        self._sent = elements, self._memory._version
        return into

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
        """Forget the rows on the GPU, whose memory is overwritten."""
        self._sent = None

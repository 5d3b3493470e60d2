"""Columns of MLPs on the GPU of a group's first rank, as the other ranks get them.

Each rank computes its own first columns and waits for a word of its own, behind which its last ones
lie in memory that the first rank's GPU writes (columns_on_gpu.py).  What they multiply, all ranks
have; the GPU takes the first one's.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ray_hetero.kernels.layers.layer_parts import KeptBlocks
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.kernels.prompts import column_memory
from ray_hetero.kernels.prompts.column_memory import (
    OUT_OF_MEMORY,
    ColumnMemory,
    RankColumns,
)
from ray_hetero.kernels.prompts.column_pieces import inner_of
from ray_hetero.planning.prefill_memory import SHARED_TOKENS

if TYPE_CHECKING:
    from ray_hetero.kernels.layers.layer import Layer

FIRST_RANK = "on the first rank of this group"
"""Place of what fails in the GPU's work, for messages."""


class ColumnsFromGpu(RankColumns):
    """The last columns of this rank's parts of the MLPs of layers that follow one another.

    Args:
        layers: with this rank's parts of the weights.
        kernel: what computes the other columns.
        memory: of this rank.
        tokens: most of a step.

    """

    about = ""
    """The first rank has the GPU."""

    def __init__(
        self, layers: Sequence[Layer], kernel: StreamingLinear, memory: ColumnMemory, tokens: int
    ) -> None:
        self.tokens = min(SHARED_TOKENS, tokens)
        """Most tokens of a step that is shared."""
        parts = layers[0].parts
        inputs = torch.empty(SHARED_TOKENS * parts.norm.weight.shape[0], dtype=torch.bfloat16)
        super().__init__(len(layers), inner_of(parts), kernel, memory, inputs)

    def prepare(self, tokens: int, kept: KeptBlocks) -> None:
        """Do nothing: the first rank has the GPU's work ordered."""

    def fetch(self, tokens: int, kept: KeptBlocks, *, is_ahead: bool = False) -> float:
        """Fetch nothing: the first rank does, and knows how long that takes."""
        return 0.0

    def agreed(self, *, takes_part: bool) -> bool:
        """Wait until the first rank says whether the GPU has a part of the next step.

        Raises:
            torch.OutOfMemoryError: the GPU's memory has run out, on all ranks.
            RuntimeError: something else has failed in the first rank.
            torch.distributed.DistError: the first rank is late.

        """
        end = time.monotonic() + column_memory.WAIT_S
        while (said := self._own.hear()) is None:
            why = ctypes.c_uint32.from_address(self._own.failed).value
            if why == OUT_OF_MEMORY:
                raise torch.OutOfMemoryError(FIRST_RANK)
            if why:
                raise RuntimeError(f"the GPU's part of a decode step has failed {FIRST_RANK}")
            if time.monotonic() > end:
                raise dist.DistError(
                    "the first rank of this group has not said in "
                    f"{column_memory.WAIT_S:g} s how a decode step is computed"
                )
            time.sleep(0)
        return said

    @contextmanager
    def of_step(self, tokens: int, kept: KeptBlocks) -> Iterator[None]:
        """Take the GPU's columns of a step that the cores compute within this.

        Args:
            tokens: of the step.
            kept: blocks that the cores of each rank compute.

        Raises:
            torch.OutOfMemoryError: the GPU's memory has run out, on all ranks.
            RuntimeError: something else has failed in the first rank, or is late.

        """
        first = self.begin()
        try:
            yield
        except RuntimeError:
            if ctypes.c_uint32.from_address(self._own.failed).value == OUT_OF_MEMORY:
                raise torch.OutOfMemoryError(FIRST_RANK) from None
            raise
        finally:
            self.end(first)

"""An embedding in host memory whose rows a GPU looks up itself, over its link.

The rows of 8,192 tokens of an 8B model are 67 MB, for which the GPU takes 1.3 ms; cores that look
them up in host memory, from where they are sent, take twice that, and are to do other things.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch

from placement.units import GIB
from ray_hetero.kernels.prompts.link_reader import current
from ray_hetero.log import logger
from ray_hetero.runtime import gpu_memory
from ray_hetero.runtime.locked_pages import lock_pages

if TYPE_CHECKING:
    from ray_hetero.kernels.prompts.gpu_prefill import GpuPrefill
    from ray_hetero.kernels.prompts.step_memory import StepMemory

PROGRAM_COLUMNS = 1024
"""Columns of a row that a program of the kernel copies."""
CHECKED_TOKENS = 8
"""Rows that the kernel is tried with."""


class GpuTable:
    """An embedding, its pages locked.

    Args:
        table: [vocabulary, N], bf16, contiguous; kept.
        tokens: most of a step.
        memory: of a GPU with kernels of Triton; in tests of the CPU.
        stream: of the GPU.

    Raises:
        RuntimeError: the pages cannot be locked, or the GPU does not see them.

    """

    def __init__(self, table: torch.Tensor, tokens: int, memory: StepMemory, stream: Any) -> None:
        self._table, self._device = table, memory.device
        if self._device.type != "cuda":
            return
        lock_pages(table)
        seen = gpu_memory.seen(table.data_ptr(), table.nbytes, self._device)
        self._seen = seen.view(torch.int16)
        # A copy would wait for weights that are on their way.
        self._tokens = memory.host_memory(tokens, dtype=torch.int64)
        seen = gpu_memory.seen(self._tokens.data_ptr(), self._tokens.nbytes, self._device)
        self._tokens_seen = seen.view(torch.int64)
        with current(stream):
            self._check()

    @property
    def rows(self) -> int:
        """Rows of the embedding."""
        return len(self._table)

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return int(self._table.shape[1])

    def __call__(self, tokens: torch.Tensor, into: torch.Tensor) -> None:
        """Look rows up, ordered on the current stream.

        Args:
            tokens: [M], int64, in host memory, all of the vocabulary.
            into: [M, N], bf16, contiguous, on the GPU.

        """
        if self._device.type != "cuda":
            torch.index_select(self._table, 0, tokens, out=into)
            return
        # The last step's have been read: its rows were multiplied before the next one begins.
        self._tokens[: len(tokens)].copy_(tokens)
        columns = into.shape[1]
        grid = (len(tokens), -(-columns // PROGRAM_COLUMNS))
        _kernel()[grid](
            self._seen, self._tokens_seen, into.view(torch.int16), columns, PROGRAM_COLUMNS
        )

    def _check(self) -> None:
        count = min(CHECKED_TOKENS, *self._tokens.shape, len(self._table))
        tokens = torch.linspace(0, len(self._table) - 1, count).long()
        size = count, self._table.shape[1]
        found = torch.zeros(size, dtype=torch.bfloat16, device=self._device)
        self(tokens, found)
        here, expected = (x.view(torch.int16) for x in (found.cpu(), self._table[tokens]))
        assert torch.equal(here, expected), "the kernel and torch look up other rows"


def table_of(table: torch.Tensor, gpu: GpuPrefill) -> GpuTable | None:
    """An embedding that a GPU looks up itself; None, and why in the log, where it cannot."""
    is_plain = table.dtype == torch.bfloat16 and table.ndim == 2 and table.is_contiguous()
    if not is_plain or (gpu.device.type == "cuda" and not gpu.uses_triton):
        return None
    try:
        made = GpuTable(table.detach(), gpu.tokens, gpu.memory, gpu.computing)
    except RuntimeError as error:
        logger.info(
            "embeddings of prompts are looked up by the cores: %s", str(error).splitlines()[0]
        )
        return None
    logger.info(
        "embeddings of prompts are looked up by the GPU, which reads %.1f GiB of the host's memory "
        "(cpu.prefill_on_gpu)",
        table.nbytes / GIB,
    )
    return made


@functools.cache
def _kernel() -> Any:
    """The kernel, imported when it is first used: builds for CPUs alone have no Triton."""
    return importlib.import_module("ray_hetero.kernels.prompts.gpu_table_triton").kernel

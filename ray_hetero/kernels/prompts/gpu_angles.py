"""Cosines and sines of positions on a GPU, by which queries and keys are rotated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ray_hetero.kernels.prompts.step_memory import StepMemory


@dataclass(frozen=True)
class _FirstRows:
    """A table's first rows on the GPU; as long as the table is here its address is its own."""

    table: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class GpuAngles:
    """Cosines and sines of the tokens of a step.

    A model has a table of up to a hundred thousand positions.  Those of new prompts, its first
    ones, stay on the GPU: looked up in host memory for each step, they come half a millisecond
    after everything else is there.

    Args:
        memory: of a step, on the same GPU.
        tokens: most of a step, of which as many positions stay.

    """

    def __init__(self, memory: StepMemory, tokens: int) -> None:
        self._memory = memory
        self._positions = torch.arange(tokens)
        self._kept: dict[int, _FirstRows] = {}

    def __call__(
        self, table: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Look positions up, ordered on the current stream.

        Args:
            table: [positions, rotated], cosines and then sines of each.
            positions: [tokens], int64, in host memory.

        Returns:
            Cosines and sines, [tokens, 1, rotated / 2] each, float32, contiguous; not to be
            written to.

        """
        first = self._first(table)
        tokens, kept = len(positions), len(first.cos)
        if tokens <= kept and torch.equal(positions, self._positions[:tokens]):
            return first.cos[:tokens], first.sin[:tokens]
        if int(positions.max()) >= kept:
            here = self._memory.host_memory(tokens, table.shape[1], dtype=table.dtype)
            return self._sent(torch.index_select(table, 0, positions, out=here))
        here = self._memory.host_memory(tokens, dtype=torch.int64).copy_(positions)
        there = here.to(self._memory.device, non_blocking=True)
        return first.cos[there], first.sin[there]

    def _first(self, table: torch.Tensor) -> _FirstRows:
        at = table.data_ptr()
        if at not in self._kept:
            rows = table[: len(self._positions)]
            here = self._memory.host_memory(*rows.shape, dtype=rows.dtype).copy_(rows)
            self._kept[at] = _FirstRows(table, *self._sent(here))
        return self._kept[at]

    def _sent(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of a table in page-locked memory on the GPU."""
        there = rows.to(self._memory.device, non_blocking=True).float().unsqueeze(1)
        cos, sin = (half.contiguous() for half in there.chunk(2, dim=-1))
        return cos, sin

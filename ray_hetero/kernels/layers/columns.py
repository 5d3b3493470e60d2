"""The last columns of MLPs on a GPU, as decode steps know them.

What computes them is in kernels/prompts: columns_on_gpu.py, and columns_from_gpu.py in the other
ranks of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ray_hetero.kernels.layers.layer_parts import KeptBlocks


class Columns(Protocol):
    """The last columns of MLPs on a GPU, of this rank or of the first of its group."""

    native: Any
    """`ColumnShare` of the native module."""

    @property
    def tokens(self) -> int:
        """Most tokens of a step; on all ranks of a group the same."""

    @property
    def about(self) -> str:
        """The GPU and what it has room for; empty on the other ranks of a group."""

    @property
    def blocks(self) -> int:
        """Blocks of 32 columns of this rank's MLP, of which its cores compute some, and not all."""

    @property
    def output_blocks(self) -> int:
        """Blocks of 32 outputs of the MLP, of which its cores may compute some; 0 if only all."""

    def of_step(self, tokens: int, kept: KeptBlocks) -> AbstractContextManager[None]:
        """Have the others of a step of so many tokens computed, whose cores compute `kept`."""

    def fetch(self, tokens: int, kept: KeptBlocks, *, is_ahead: bool = False) -> float:
        """Have their weights come; seconds until a step waits for none, arguments as `of_step`.

        Ahead of the step it is left to that to learn that the GPU's memory has run out.
        """

    def agreed(self, *, takes_part: bool) -> bool:
        """Decide whether the GPU has a part of the next step; the same on all ranks of a group."""

    def prepare(self, tokens: int, kept: KeptBlocks) -> None:
        """Have steps like the last one take a core as little as those that come after many."""


MakeColumns = Callable[[int], Columns | None]
"""Makes what computes columns of the first layers of a run, by their number; None where nothing
can.  The same on all ranks of a group."""


def no_columns(count: int) -> None:
    """Make nothing, as `MakeColumns`."""

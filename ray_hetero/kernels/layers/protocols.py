"""Interfaces of the GPU's help that the layers of a CPU rank call.

The layers compute everything on the cores by themselves.  Where a GPU helps, its side implements
these interfaces and is handed in when the layers are put together (layer_fusion.py), so that
nothing in the layers imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ray_hetero.kernels.layers.kv_layouts import Caches
from ray_hetero.kernels.layers.layer_parts import CacheAddress
from ray_hetero.kernels.layers.step_rows import StepRows
from ray_hetero.kernels.linear.streaming_linear import ManyTokens


class StageRows(Protocol):
    """Memory of a GPU in which the last layers of a stage leave their results for the next one."""

    def may_take(self, tokens: int) -> bool:
        """Whether a step's results can stay on the GPU."""

    def put(
        self, tokens: int, rows: torch.Tensor | slice, x: torch.Tensor, total: torch.Tensor
    ) -> None:
        """Write some rows of a step, after the work that the GPU has been given.

        Args:
            tokens: of the step.
            rows: numbers of the rows.
            x: [rows, N], bf16, on the GPU or the host.
            total: [rows, N], the same of the residual.

        """

    def finish(
        self, hidden: torch.Tensor, behind: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return placeholders for the results, whose values stay on the GPU.

        Args:
            hidden: the step's input, of the same shape.
            behind: finishes the step after its message was sent.

        """

    def note(self, x: torch.Tensor, total: torch.Tensor) -> None:
        """Remember the tensors that the last layers return for a step."""


class LayersOnGpu(Protocol):
    """A GPU that computes whole layers of a CPU rank, attention included, in large steps."""

    instead: str
    """Consequence of the GPU's running out of memory, for messages."""
    others: tuple[tuple[torch.Tensor, ...], ...]
    """Caches of the other ranks of a group, by rank and layer."""

    @property
    def gpu(self) -> ManyTokens | None:
        """The GPU's side in this process; None in ranks whose group's first rank has it."""

    def reaches(self, caches: Sequence[torch.Tensor]) -> bool:
        """Make the layers' caches accessible to the GPU; whether that succeeded."""

    def __call__(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        rows: StepRows,
        caches: Caches | None,
        meanwhile: Callable[[], None],
        output: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute some rows of a step.

        Args:
            positions: [M], int64.
            hidden: [M, N], bf16.
            residual: [M, N], bf16; None at the beginning of a model.
            rows: those that the GPU computes.
            caches: None for runs without requests, which write no keys and values.
            meanwhile: called while the GPU computes.
            output: the stage's `StageRows`, if the results stay on the GPU.

        Returns:
            [rows, N], which is still to be added to the residual, and it.

        Raises:
            torch.OutOfMemoryError: the GPU's memory has run out.
            RuntimeError: what else CUDA says.
            TimeoutError: the GPU, or the cache, takes too long.

        """

    def finish(self) -> None:
        """Write the keys and values of the last step that are not in the cache yet.

        Raises:
            RuntimeError: what CUDA says.
            TimeoutError: the GPU takes too long.

        """


class SharesDecode(Protocol):
    """Decode steps that the cores share with a GPU."""

    def has(self, tokens: int) -> bool:
        """Whether the GPU computes a part of a step of so many tokens."""

    def fetch(self, tokens: int) -> bool:
        """Prefetch the weights of the GPU's part of the next step; whether using the GPU pays."""

    def interrupt(self) -> None:
        """Learn that a prompt has evicted weights: the next step may use another share."""

    def __call__(
        self, requests: Sequence[Any], caches: Sequence[CacheAddress], hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Compute a decode step.

        Args:
            requests: of the native module, one for each group of layers with KV blocks of its own.
            caches: of each layer.
            hidden: [M, N], bf16, contiguous.
            residual: [M, N], bf16, contiguous; None at the beginning of a model.

        Returns:
            [M, N], which is still to be added to the residual, and it.

        Raises:
            torch.OutOfMemoryError: the GPU's memory has run out; in a group on all ranks.
            RuntimeError: what else CUDA says.
            TimeoutError: submitting the GPU's work takes too long.
            torch.distributed.DistError: another rank of the group has ended, or is late.

        """

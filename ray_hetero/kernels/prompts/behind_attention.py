"""What lies behind a layer's attention on a GPU, in decode steps that the cores share with it.

The weights of one layer are on the GPU in whole when its attention is done; those of the next one
that the GPU computes come, and are expanded, while the cores compute the layers in between
(shared_decode.py).  In a tensor-parallel group the first rank has the GPU, which reads the parts of
all ranks; each rank brings the attention of its heads, and takes the result from memory that all
map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from ray_hetero.kernels.linear.rank_sums import RankSums
from ray_hetero.kernels.prompts import gpu_post_attention
from ray_hetero.kernels.prompts.gpu_prefill import GpuPrefill
from ray_hetero.kernels.prompts.link_reader import current
from ray_hetero.kernels.prompts.prompt_group import RESULTS, PromptGroup
from ray_hetero.planning.prefill_memory import SHARED_TOKENS

if TYPE_CHECKING:
    from ray_hetero.kernels.layers.layer import Layer

STATUS_ELEMENTS = 16
"""Elements of a sum by which ranks tell each other how something went: a vector's."""


class BehindAttention(Protocol):
    """Computes what lies behind the attention of some layers."""

    @property
    def tokens(self) -> int:
        """Most tokens of a step; on all ranks of a group the same."""

    @property
    def about(self) -> str:
        """The GPU and what it has room for; empty on the other ranks of a group."""

    def memory(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory where cores leave an attention [tokens, queries] and the residual [tokens, N]."""

    def order(self, place: int) -> None:
        """Have the weights of a layer come; nothing else may be asked for before its `compute`."""

    def compute(
        self, place: int, attended: torch.Tensor, residual: torch.Tensor, following: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a layer whose weights were ordered, and order those of another one.

        Args:
            place: of the layer.
            attended: its attention, bf16, in what `memory` gave.
            residual: the same.
            following: place of the layer that is computed next.

        Returns:
            [tokens, N], which is still to be added to the residual, and it; until the next call.

        Raises:
            torch.OutOfMemoryError: the GPU's memory has run out; in a group on all ranks.
            RuntimeError: what else CUDA says.
            TimeoutError: ordering the GPU's work takes too long.

        """


class OnGpu:
    """Layers of which this rank has all.

    Args:
        layers: with their whole weights.
        gpu: has them, and memory for those of one layer.
        into: page-locked memory for both results, [2, elements], bf16; None for new memory.

    """

    def __init__(
        self, layers: Sequence[Layer], gpu: GpuPrefill, into: torch.Tensor | None = None
    ) -> None:
        self._layers = layers
        self.gpu = gpu
        """GPU that computes."""
        hidden, queries = layers[0].parts.output.weight.shape
        self._attended = gpu.memory.host_memory(SHARED_TOKENS, queries)
        self._residual = gpu.memory.host_memory(SHARED_TOKENS, hidden)
        self._results = (
            gpu.memory.host_memory(RESULTS, SHARED_TOKENS * hidden) if into is None else into
        )

    @property
    def tokens(self) -> int:
        """Most tokens of a step."""
        return min(SHARED_TOKENS, self.gpu.tokens)

    @property
    def about(self) -> str:
        """The GPU and what it has room for."""
        return self.gpu.about

    def memory(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Page-locked memory."""
        return self._attended[:tokens], self._residual[:tokens]

    def order(self, place: int) -> None:
        """Have them come and be expanded, unless they are there."""
        self.gpu.expand_ahead(self._layers[place].parts.linears)

    def compute(
        self, place: int, attended: torch.Tensor, residual: torch.Tensor, following: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute as `BehindAttention` says."""
        gpu = self.gpu
        gpu.begin(len(attended), is_shared=True)
        with torch.inference_mode(), current(gpu.computing):
            y, total = gpu_post_attention.behind_from(
                gpu, self._layers[place].parts, attended, residual
            )
            results = gpu.memory.send(y, total, into=list(self._results))
            gpu.mark()
        self.order(following)
        gpu.wait_for_mark()
        return results[0], results[1]


class InGroup:
    """Layers of which each rank of a tensor-parallel group has a part; all ranks call the same.

    Args:
        group: with memory for results that all ranks map.
        sums: of the same ranks, by which they meet.
        shape: hidden state's elements, and queries' of this rank's heads.
        tokens: most of a step.
        first: what computes them; None where this rank is not the first.

    """

    def __init__(
        self, group: PromptGroup, sums: RankSums, shape: tuple[int, int], tokens: int,
        first: OnGpu | None,
    ) -> None:  # fmt: skip
        self._group = group
        self._sums = sums
        self._hidden, self._queries = shape
        self._tokens = tokens
        self._first = first
        self._attended = torch.empty(SHARED_TOKENS, self._queries, dtype=torch.bfloat16)
        self._residual = (
            torch.empty(SHARED_TOKENS, self._hidden, dtype=torch.bfloat16)
            if first is None
            else first.memory(SHARED_TOKENS)[1]
        )

    @property
    def tokens(self) -> int:
        """Most tokens of a step."""
        return min(SHARED_TOKENS, self._tokens)

    @property
    def about(self) -> str:
        """Of the first rank."""
        return "" if self._first is None else self._first.about

    def memory(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory of this rank; for the residual what the first rank's GPU reads."""
        return self._attended[:tokens], self._residual[:tokens]

    def order(self, place: int) -> None:
        """Order the layer in the first rank; other ranks have nothing to order."""
        if self._first is not None:
            self._first.order(place)

    def compute(
        self, place: int, attended: torch.Tensor, residual: torch.Tensor, following: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute as `BehindAttention` says, at once on all ranks with the same result."""
        whole = self._of_all_heads(attended)
        problem: torch.OutOfMemoryError | None = None
        if self._first is not None:
            try:
                self._first.compute(place, whole, residual, following)
            except torch.OutOfMemoryError as error:
                problem = error
        if self._any(problem is not None):
            raise problem or torch.OutOfMemoryError("on the first rank of this group")
        tokens = len(attended)
        found = self._group.results[:, : tokens * self._hidden].view(RESULTS, tokens, -1)
        return found[0], found[1]

    def _of_all_heads(self, attended: torch.Tensor) -> torch.Tensor:
        """[tokens, queries] of all ranks' heads, in what the first rank's GPU reads."""
        tokens, queries = len(attended), self._sums.size * self._queries
        # What others have is 0 here: a sum of one value and zeros is exact.
        own = torch.zeros(tokens, queries)
        begin = self._sums.own * self._queries
        own[:, begin : begin + self._queries] = attended
        if self._first is None:
            whole = torch.empty(tokens, queries, dtype=torch.bfloat16)
        else:
            whole = self._first.memory(tokens)[0]
        at_once = max(1, self._sums.elements // queries)
        for begin in range(0, tokens, at_once):
            self._sums.add(own[begin : begin + at_once], whole[begin : begin + at_once])
        return whole

    def _any(self, is_so: bool) -> bool:
        """Whether something is so on any rank; all ranks have to come."""
        own, found = torch.zeros(STATUS_ELEMENTS), torch.empty(STATUS_ELEMENTS).bfloat16()
        own[0] = float(is_so)
        self._sums.add(own, found)
        return bool(found[0] > 0)

"""Embeddings of prompts, looked up to where the GPU that computes them reads its input.

The hidden states of 8,192 tokens of an 8B model are 67 MB.  In memory that is new in each step, the
system would hand them out page by page, and they would be copied once more before they are sent.
They cross the link while others are looked up, before the first layer begins (`EmbeddedRows`).
In a group only the first rank has the GPU; it waits for the others, which look up the same rows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from ray_hetero.compat.models.compilation import is_compiled
from ray_hetero.compat.models.cpu_linear import look_up_with
from ray_hetero.kernels.step_route import Place
from ray_hetero.offload.weights.link_reader import current

if TYPE_CHECKING:
    from ray_hetero.kernels.linear.streaming_linear import StreamingLinear


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
        """Copies of rows on the GPU, for the caller to overwrite; None where they differ there.

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


class ComputesPrompts(Protocol):
    """A GPU that computes prompts (offload_gpu.py)."""

    @property
    def memory(self) -> Any:
        """Its `StepMemory`."""

    @property
    def computing(self) -> Any:
        """Stream of its products."""

    def leaving_shortage(self) -> AbstractContextManager[None]:
        """Leave it to the next call to fail where memory runs out."""


def look_up_for(
    kernel: StreamingLinear, gpu: ComputesPrompts | None, model: nn.Module
) -> EmbeddedRows | None:
    """Make a model's embedding write rows of prompts where a GPU reads them.

    Args:
        kernel: of this rank, whose limits and routes say which steps these are.
        gpu: computes all layers of the model that this rank has, from the first one on; None in a
            rank of a group that does not have the GPU, which keeps memory of its own for as many
            tokens.
        model: vLLM's, with its embedding; what is compiled is left as it is.

    Returns:
        Where the rows are; None where the embedding stays as it was.

    """
    found = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    # The rows of one must not take the place of another's, and of a slice others are to be added.
    if len(found) != 1 or found[0].tp_size > 1 or any(map(is_compiled, model.modules())):
        return None
    (layer,) = found
    if not isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
        return None
    elements = kernel.limits.gpu_room * layer.weight.shape[1]
    embedded: EmbeddedRows = (
        EmbeddedRows(torch.empty(elements, dtype=torch.bfloat16))
        if gpu is None
        else gpu.memory.embedded
    )

    def look_up(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
        if kernel.route_of(tokens.numel()).place is not Place.GPU:
            return None
        if gpu is not None:
            with gpu.leaving_shortage():
                return embedded(table, tokens, gpu.computing)
        return embedded(table, tokens)

    look_up_with(layer, look_up)
    return embedded

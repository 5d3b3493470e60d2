"""Embeddings of prompts, looked up to where the GPU that computes them reads its input.

The hidden states of 8,192 tokens of an 8B model are 67 MB.  In memory that is new in each step, the
system would hand them out page by page, and they would be copied once more before they are sent.
They cross the link while others are looked up, before the first layer begins (embedded_rows.py).
In a group only the first rank has the GPU; it waits for the others, which look up the same rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from ray_hetero.compat.models.compilation import is_compiled
from ray_hetero.compat.models.cpu_linear import look_up_with
from ray_hetero.offload.prefill.embedded_rows import EmbeddedRows

if TYPE_CHECKING:
    from ray_hetero.offload.prefill.offload_gpu import OffloadGpu


class ComputesPrompts(Protocol):
    """A GPU that computes prompts of this rank, or of its group."""

    from_tokens: int
    """Least tokens of a step that the GPU computes."""

    @property
    def tokens(self) -> int:
        """Most tokens of such a step."""

    @property
    def gpu(self) -> OffloadGpu | None:
        """The GPU; None where another rank of the group has it."""


def look_up_for(prompts: ComputesPrompts, model: nn.Module) -> EmbeddedRows | None:
    """Make a model's embedding write rows of prompts where a GPU reads them.

    Args:
        prompts: computes all layers of the model that this rank has, from the first one on.  A rank
            of a group that does not have the GPU keeps memory of its own for as many tokens.
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
    gpu = prompts.gpu
    embedded = (
        EmbeddedRows(torch.empty(prompts.tokens * layer.weight.shape[1], dtype=torch.bfloat16))
        if gpu is None
        else gpu.memory.embedded
    )

    def look_up(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
        if tokens.numel() < prompts.from_tokens:
            return None
        if gpu is not None:
            with gpu.leaving_shortage():
                return embedded(table, tokens, gpu.computing)
        return embedded(table, tokens)

    look_up_with(layer, look_up)
    return embedded

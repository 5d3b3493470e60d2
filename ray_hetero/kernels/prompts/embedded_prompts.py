"""Embeddings of prompts, looked up to where the GPU that computes them reads its input.

The hidden states of 8,192 tokens of an 8B model are 67 MB.  In memory that is new in each step, the
system would hand them out page by page, and they would be copied once more before they are sent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from ray_hetero.compat.compilation import is_compiled
from ray_hetero.compat.cpu_linear import look_up_with
from ray_hetero.kernels.prompts.gpu_prefill import GpuPrefill


def look_up_for(gpu: GpuPrefill, from_tokens: int, model: nn.Module) -> bool:
    """Have a model's embedding leave prompts where a GPU reads them; whether it does.

    Args:
        gpu: computes all layers of the model that this rank has, from the first one on.
        from_tokens: of a step that it computes.
        model: vLLM's, with its embedding; what is compiled is left as it is.

    """
    found = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    # The rows of one must not take the place of another's, and of a slice others are to be added.
    if len(found) != 1 or found[0].tp_size > 1 or any(map(is_compiled, model.modules())):
        return False
    look_up_with(found[0], _look_up(gpu, from_tokens))
    return True


def _look_up(
    gpu: GpuPrefill, from_tokens: int
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]:
    def look_up(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
        is_prompt = from_tokens <= tokens.numel() <= gpu.tokens
        if is_prompt and gpu.memory.has_room_for(table, tokens):
            return gpu.memory.embedded(table, tokens)
        return None

    return look_up

"""Embeddings as vLLM has them, small."""

from __future__ import annotations

from typing import Any

import torch
from decoder_parts import HIDDEN
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

VOCABULARY = 200


def embedding(dtype: torch.dtype = torch.bfloat16, size: int = 1, kind: Any = None) -> Any:
    """A layer, without the groups that vLLM's own constructor asks for."""
    kind = kind or VocabParallelEmbedding
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    weight = torch.randn(VOCABULARY, HIDDEN).to(dtype)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.quant_method, layer.tp_size = UnquantizedEmbeddingMethod(), size
    return layer


def model_of(*layers: Any) -> Any:
    """A model with these modules."""
    return torch.nn.ModuleList(layers)

"""Embeddings as vLLM has them, small, and steps whose input they give."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from decoder_parts import HIDDEN
from paged_steps import Conversation, Steps
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from ray_hetero.offload.prefill.embedded_prompts import EmbeddedRows, look_up_for

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


@dataclass
class EmbeddedSteps:
    """Steps whose input is looked up."""

    steps: Steps
    layer: Any
    rows: EmbeddedRows
    tokens: dict[Conversation, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def made(cls, monkeypatch: pytest.MonkeyPatch, **given: Any) -> EmbeddedSteps:
        """Steps, and an embedding for them.

        Args:
            monkeypatch: replaces their input.
            given: more arguments of `Steps`.

        """
        steps = Steps(monkeypatch, **{"layers": 3, "blocks": 160, "most": 512} | given)
        layer = embedding()
        rows = look_up_for(steps.kernel, steps.kernel.gpu, model_of(layer))
        assert rows is not None
        made = cls(steps, layer, rows)
        begin = steps.begin

        def begin_embedded(parts: Any) -> tuple[Any, Any]:
            positions, _ = begin(parts)
            own = torch.cat([made.tokens[request][b:e] for request, b, e in parts])
            # What was there before must not be taken for these rows.
            rows._memory.data.fill_(torch.nan)
            return positions, layer(own)

        monkeypatch.setattr(steps, "begin", begin_embedded)
        return made

    def request(
        self, tokens: int, after: Conversation | None = None, shared: int = 0
    ) -> Conversation:
        """A request; arguments as of `Steps.request`."""
        request = self.steps.request(tokens, after, shared)
        self.tokens[request] = torch.randint(VOCABULARY, (tokens,))
        if after is not None:
            cached = shared * self.steps.block
            self.tokens[request][:cached] = self.tokens[after][:cached]
        request.inputs.copy_(self.layer.weight[self.tokens[request]])
        return request

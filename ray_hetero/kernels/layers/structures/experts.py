"""Layers with experts behind their attention, which stay vLLM's module and stream their weights.

The attention, and the norm before the experts, are computed as one operator a layer.
"""

from __future__ import annotations

from typing import Any

from ray_hetero.compat.models.decoder_classes import has_forward_of
from ray_hetero.kernels.layers.structures.base import (
    Calls,
    LayerModules,
    is_made_of,
    named_as_llamas,
)

MODELS = ("MixtralModel", "Qwen2MoeModel", "Qwen3MoeModel", "Glm4MoeModel")
LAYERS = (
    "MixtralDecoderLayer", "Qwen2MoeDecoderLayer", "Qwen3MoeDecoderLayer", "Glm4MoeDecoderLayer",
)  # fmt: skip
ATTENTIONS = ("MixtralAttention", "Qwen2MoeAttention", "Qwen3MoeAttention", "Glm4MoeAttention")


class Experts:
    """The structure of the layers of Mixtral, of Qwen's mixtures and of GLM-4.5."""

    layers = "layers"
    calls = Calls.RESIDUAL

    def is_model(self, model: Any) -> bool:
        """Whether a model is one of this family."""
        return has_forward_of(model, *MODELS)

    def modules(self, layer: Any) -> LayerModules | None:
        """The modules of a layer; None if its classes compute something else."""
        if not is_made_of(layer, LAYERS, {"self_attn": ATTENTIONS}):
            return None
        attention = layer.self_attn
        if getattr(attention, "dual_chunk_attention_config", None):
            return None
        mlp = layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp
        return named_as_llamas(layer, attention, rotary=attention.rotary_emb, mlp=mlp)


class GptOss:
    """The structure of the layers of gpt-oss, whose attention has sinks."""

    layers = "layers"
    calls = Calls.HIDDEN_FIRST

    def is_model(self, model: Any) -> bool:
        """Whether a model is one of this family."""
        return has_forward_of(model, "GptOssModel")

    def modules(self, layer: Any) -> LayerModules | None:
        """The modules of a layer; None if its classes compute something else."""
        if not is_made_of(layer, ("TransformerBlock",), {"attn": ("OAIAttention",)}):
            return None
        return named_as_llamas(layer, layer.attn, rotary=layer.attn.rotary_emb, mlp=layer.mlp)

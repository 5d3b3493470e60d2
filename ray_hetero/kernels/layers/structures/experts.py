"""Layers with experts behind their attention, which stay vLLM's module and stream their weights.

The attention, and the norm before the experts, are computed as one operator a layer.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ray_hetero.kernels.layers.structures.base import (
    Calls,
    LayerModules,
    Structure,
    named_as_llamas,
)


class Experts(Structure):
    """The structure of the layers of Mixtral, of Qwen's mixtures and of GLM-4.5."""

    models = ("MixtralModel", "Qwen2MoeModel", "Qwen3MoeModel", "Glm4MoeModel")
    names = (
        "MixtralDecoderLayer", "Qwen2MoeDecoderLayer", "Qwen3MoeDecoderLayer",
        "Glm4MoeDecoderLayer",
    )  # fmt: skip
    parts: ClassVar = {
        "self_attn": (
            "MixtralAttention", "Qwen2MoeAttention", "Qwen3MoeAttention", "Glm4MoeAttention",
        )
    }  # fmt: skip
    calls = Calls.RESIDUAL

    def _modules(self, layer: Any) -> LayerModules | None:
        attention = layer.self_attn
        if getattr(attention, "dual_chunk_attention_config", None):
            return None
        mlp = layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp
        return named_as_llamas(layer, attention, rotary=attention.rotary_emb, mlp=mlp)


class GptOss(Structure):
    """The structure of the layers of gpt-oss, whose attention has sinks."""

    models = ("GptOssModel",)
    names = ("TransformerBlock",)
    parts: ClassVar = {"attn": ("OAIAttention",)}
    calls = Calls.HIDDEN_FIRST

    def _modules(self, layer: Any) -> LayerModules:
        return named_as_llamas(layer, layer.attn, rotary=layer.attn.rotary_emb, mlp=layer.mlp)

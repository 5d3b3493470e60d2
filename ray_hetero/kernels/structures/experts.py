"""Layers with experts behind their attention, which stay vLLM's module and stream their weights.

The attention, and the norm before the experts, are computed as one operator a layer.
"""

from __future__ import annotations

from typing import Any

from ray_hetero.compat.decoder_classes import has_forward_of
from ray_hetero.kernels.structures.base import Calls, LayerModules, is_made_of
from ray_hetero.kernels.structures.llama import head_norms

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
        if getattr(layer.self_attn, "dual_chunk_attention_config", None):
            return None
        mlp = layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp
        return _modules(layer, layer.self_attn, mlp)


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
        return _modules(layer, layer.attn, layer.mlp)


def _modules(layer: Any, attention: Any, mlp: Any) -> LayerModules:
    return LayerModules(
        input_norm=layer.input_layernorm,
        qkv=attention.qkv_proj,
        head_norms=head_norms(attention),
        rotary=attention.rotary_emb,
        attend=attention.attn,
        output=attention.o_proj,
        norm=layer.post_attention_layernorm,
        mlp=mlp,
    )

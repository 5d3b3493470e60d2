"""Llama's layers: attention, then a gated MLP, a norm before each.

Qwen 2 adds biases of queries, keys and values, Qwen 3 norms of heads, Gemma norms by 1 + w.
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

MODELS = ("LlamaModel", "Qwen2Model", "MistralModel", "GemmaModel")
LAYERS = (
    "LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "MistralDecoderLayer",
    "GemmaDecoderLayer",
)  # fmt: skip
ATTENTIONS = (
    "LlamaAttention", "Qwen2Attention", "Qwen3Attention", "MistralAttention", "GemmaAttention",
)  # fmt: skip
MLPS = ("LlamaMLP", "Qwen2MLP", "MistralMLP", "GemmaMLP")


class Llama:
    """The structure of Llama's layers."""

    layers = "layers"
    calls = Calls.RESIDUAL

    def is_model(self, model: Any) -> bool:
        """Whether a model is one of this family."""
        return has_forward_of(model, *MODELS)

    def modules(self, layer: Any) -> LayerModules | None:
        """The modules of a layer; None if its classes compute something else."""
        if not is_made_of(layer, LAYERS, {"self_attn": ATTENTIONS, "mlp": MLPS}):
            return None
        attention = layer.self_attn
        # Variants of Qwen 2 and of Mistral that compute something in between.
        if (
            getattr(attention, "dual_chunk_attention_config", None)
            or getattr(attention, "do_llama_4_scaling", False)
            or getattr(layer, "ada_rms_norm_t_cond", None) is not None
        ):
            return None
        return named_as_llamas(layer, attention, rotary=attention.rotary_emb, gated=layer.mlp)

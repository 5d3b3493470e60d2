"""Llama's layers: attention, then a gated MLP, a norm before each.

Qwen 2 adds biases of queries, keys and values, Qwen 3 norms of heads, Gemma norms by 1 + w.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ray_hetero.kernels.layers.structures.base import (
    Calls,
    LayerModules,
    Structure,
    named_as_llamas,
)


class Llama(Structure):
    """The structure of Llama's layers."""

    models = ("LlamaModel", "Qwen2Model", "MistralModel", "GemmaModel")
    names = (
        "LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "MistralDecoderLayer",
        "GemmaDecoderLayer",
    )  # fmt: skip
    parts: ClassVar = {
        "self_attn": (
            "LlamaAttention", "Qwen2Attention", "Qwen3Attention", "MistralAttention",
            "GemmaAttention",
        ),
        "mlp": ("LlamaMLP", "Qwen2MLP", "MistralMLP", "GemmaMLP"),
    }  # fmt: skip
    calls = Calls.RESIDUAL

    def _modules(self, layer: Any) -> LayerModules | None:
        attention = layer.self_attn
        # Variants of Qwen 2 and of Mistral that compute something in between.
        if (
            getattr(attention, "dual_chunk_attention_config", None)
            or getattr(attention, "do_llama_4_scaling", False)
            or getattr(layer, "ada_rms_norm_t_cond", None) is not None
        ):
            return None
        return named_as_llamas(layer, attention, rotary=attention.rotary_emb, gated=layer.mlp)

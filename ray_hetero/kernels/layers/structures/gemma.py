"""Layers with a norm before and behind the attention and the MLP: Gemma 2, Gemma 3, GLM-4.

Gemma weights its norms by 1 + w, GLM-4 turns neighbours together.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ray_hetero.compat.models.decoder_classes import has_forward_of
from ray_hetero.kernels.layers.structures.base import (
    Calls,
    LayerModules,
    Structure,
    named_as_llamas,
)

GLM = "Glm4DecoderLayer"


class Gemma(Structure):
    """The structure of the layers of Gemma 2."""

    models = ("Gemma2Model", "Gemma3Model", "LlamaModel")
    """GLM-4's model has the forward function of Llama's."""
    names = ("Gemma2DecoderLayer", "Gemma3DecoderLayer", GLM)
    parts: ClassVar = {
        "self_attn": ("Gemma2Attention", "Gemma3Attention", "Glm4Attention"),
        "mlp": ("Gemma2MLP", "Gemma3MLP", "LlamaMLP"),
    }
    calls = Calls.RESIDUAL

    def _modules(self, layer: Any) -> LayerModules:
        attention = layer.self_attn
        output_norm, norm, down_norm = (
            ("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
            if has_forward_of(layer, GLM)
            else ("post_attention_layernorm", "pre_feedforward_layernorm",
                  "post_feedforward_layernorm")
        )  # fmt: skip
        return named_as_llamas(
            layer,
            attention,
            rotary=attention.rotary_emb,
            gated=layer.mlp,
            output_norm=getattr(layer, output_norm),
            norm=getattr(layer, norm),
            down_norm=getattr(layer, down_norm),
        )

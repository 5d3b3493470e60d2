"""Layers that add to their input and hand on the sum: Granite, StableLM.

Granite multiplies what is added, StableLM has layer norms.
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


class Granite:
    """The structure of Granite's layers."""

    layers = "layers"
    calls = Calls.SUM

    def is_model(self, model: Any) -> bool:
        """Whether a model is one of this family."""
        return has_forward_of(model, "GraniteModel")

    def modules(self, layer: Any) -> LayerModules | None:
        """The modules of a layer; None if its classes compute something else."""
        parts = {"self_attn": ("GraniteAttention",), "mlp": ("GraniteMLP",)}
        if not is_made_of(layer, ("GraniteDecoderLayer",), parts):
            return None
        attention = layer.self_attn
        rotary = attention.rotary_emb if attention.use_rope else None
        multiplier = float(layer.residual_multiplier)
        return named_as_llamas(
            layer, attention, rotary=rotary, gated=layer.mlp, multiplier=multiplier
        )


class StableLm:
    """The structure of StableLM's layers."""

    layers = "layers"
    calls = Calls.SUM_AND_MORE

    def is_model(self, model: Any) -> bool:
        """Whether a model is one of this family."""
        return has_forward_of(model, "StableLMEpochModel")

    def modules(self, layer: Any) -> LayerModules | None:
        """The modules of a layer; None if its classes compute something else."""
        parts = {"self_attn": ("StablelmAttention",), "mlp": ("StablelmMLP",)}
        if not is_made_of(layer, ("StablelmDecoderLayer",), parts):
            return None
        attention = layer.self_attn
        return named_as_llamas(layer, attention, rotary=attention.rotary_emb, gated=layer.mlp)

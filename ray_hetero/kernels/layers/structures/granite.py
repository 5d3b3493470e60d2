"""Layers that add to their input and hand on the sum: Granite, StableLM.

Granite multiplies what is added, StableLM has layer norms.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ray_hetero.kernels.layers.structures.base import (
    Calls,
    LayerModules,
    Structure,
    named_as_llamas,
)


class Granite(Structure):
    """The structure of Granite's layers."""

    models = ("GraniteModel",)
    names = ("GraniteDecoderLayer",)
    parts: ClassVar = {"self_attn": ("GraniteAttention",), "mlp": ("GraniteMLP",)}
    calls = Calls.SUM

    def _modules(self, layer: Any) -> LayerModules:
        attention = layer.self_attn
        rotary = attention.rotary_emb if attention.use_rope else None
        multiplier = float(layer.residual_multiplier)
        return named_as_llamas(
            layer, attention, rotary=rotary, gated=layer.mlp, multiplier=multiplier
        )


class StableLm(Structure):
    """The structure of StableLM's layers."""

    models = ("StableLMEpochModel",)
    names = ("StablelmDecoderLayer",)
    parts: ClassVar = {"self_attn": ("StablelmAttention",), "mlp": ("StablelmMLP",)}
    calls = Calls.SUM_AND_MORE

    def _modules(self, layer: Any) -> LayerModules:
        attention = layer.self_attn
        return named_as_llamas(layer, attention, rotary=attention.rotary_emb, gated=layer.mlp)

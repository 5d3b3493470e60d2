"""OPT's layers: layer norms, an MLP without a gate, positions in the embeddings only."""

from __future__ import annotations

from typing import Any

from ray_hetero.compat.models.decoder_classes import has_forward_of
from ray_hetero.kernels.layers.structures.base import Calls, LayerModules, is_made_of


class Opt:
    """The structure of OPT's layers."""

    layers = "layers"
    calls = Calls.WITHOUT_POSITIONS

    def is_model(self, model: Any) -> bool:
        """Whether a model is one of this family."""
        return has_forward_of(model, "OPTDecoder")

    def modules(self, layer: Any) -> LayerModules | None:
        """The modules of a layer; None if its classes compute something else.

        Layers of OPT-350m, whose norms are of the sums, are something else.
        """
        if not is_made_of(layer, ("OPTDecoderLayer",), {"self_attn": ("OPTAttention",)}):
            return None
        if not layer.do_layer_norm_before:
            return None
        attention = layer.self_attn
        return LayerModules(
            input_norm=layer.self_attn_layer_norm,
            qkv=attention.qkv_proj,
            head_norms=(),
            rotary=None,
            attend=attention.attn,
            output=attention.out_proj,
            norm=layer.final_layer_norm,
            gate_up=layer.fc1,
            activation=layer.activation_fn,
            down=layer.fc2,
        )

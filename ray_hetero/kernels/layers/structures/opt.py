"""OPT's layers: layer norms, an MLP without a gate, positions in the embeddings only."""

from __future__ import annotations

from typing import Any, ClassVar

from ray_hetero.kernels.layers.structures.base import Calls, LayerModules, Structure


class Opt(Structure):
    """The structure of OPT's layers."""

    models = ("OPTDecoder",)
    names = ("OPTDecoderLayer",)
    parts: ClassVar = {"self_attn": ("OPTAttention",)}
    calls = Calls.WITHOUT_POSITIONS

    def _modules(self, layer: Any) -> LayerModules | None:
        # Norms of OPT-350m are of the sums.
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

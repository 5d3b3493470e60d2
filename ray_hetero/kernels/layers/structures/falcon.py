"""Falcon's layers: the MLP is beside the attention in most of them, and has no gate."""

from __future__ import annotations

from typing import Any, ClassVar

from ray_hetero.kernels.layers.structures.base import Calls, LayerModules, Structure


class Falcon(Structure):
    """The structure of Falcon's layers."""

    models = ("FalconModel",)
    names = ("FalconDecoderLayer",)
    parts: ClassVar = {"self_attention": ("FalconAttention",), "mlp": ("FalconMLP",)}
    layers = "h"
    calls = Calls.SUM

    def _modules(self, layer: Any) -> LayerModules | None:
        if (names := _norms(layer.config)) is None:
            return None
        attention, mlp = layer.self_attention, layer.mlp
        input_norm, norm = (getattr(layer, name) for name in names)
        return LayerModules(
            input_norm=input_norm,
            qkv=attention.query_key_value,
            head_norms=(),
            rotary=attention.rotary_emb if attention.use_rotary else None,
            attend=attention.attn,
            output=attention.dense,
            norm=norm,
            gate_up=mlp.dense_h_to_4h,
            activation=mlp.act,
            down=mlp.dense_4h_to_h,
            is_parallel=layer.config.parallel_attn,
        )


def _norms(config: Any) -> tuple[str, str] | None:
    """Attributes of the norms before the attention and before the MLP."""
    if not config.parallel_attn:
        is_new = config.new_decoder_architecture
        return None if is_new else ("input_layernorm", "post_attention_layernorm")
    if config.num_ln_in_parallel_attn == 2:
        # Only new layers use the second one.
        return ("ln_attn", "ln_mlp") if config.new_decoder_architecture else None
    return "input_layernorm", "input_layernorm"

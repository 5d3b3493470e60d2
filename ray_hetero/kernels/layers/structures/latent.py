"""Layers of DeepSeek V2 and V3, whose heads attend to one latent vector of each token.

What comes behind the attention, an MLP or experts, stays vLLM's module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray_hetero.compat.models.decoder_classes import has_forward_of
from ray_hetero.kernels.layers.structures.base import is_made_of


@dataclass(frozen=True)
class LatentModules:
    """vLLM's modules of a layer with multi-head latent attention, by the part that each is."""

    input_norm: Any
    """Norm of the attention's input."""
    down: Any
    """Layer for the latent of queries, if they have one, the latent and the keys' rotated part."""
    query_norm: Any
    """Norm of the latent of queries; None where queries are made of the hidden state."""
    queries: Any
    """Layer for the queries of all heads, each a plain part and a rotated one."""
    latent_norm: Any
    rotary: Any
    """Rotary embedding that turns the rotated parts by their positions."""
    wrapper: Any
    """vLLM's module around these products and the attention, and the one that is below."""
    attend: Any
    """vLLM's `MLAAttention`."""
    output: Any
    """Linear layer that the attention's results are multiplied with."""
    norm: Any
    """Norm of the input of the MLP or the experts."""
    mlp: Any
    """MLP or experts, which stay vLLM's module."""
    attention: Any
    """All from `down` to `output` in one module of vLLM's."""

    @property
    def linears(self) -> tuple[Any, Any, Any]:
        """Linear layers in the order of their products."""
        return self.down, self.queries, self.output


def latent_modules(model: Any, layer: Any) -> LatentModules | None:
    """The modules of a layer of a model of vLLM's; None if it computes something else."""
    parts = {"self_attn": ("DeepseekV2MLAAttention",)}
    if (
        not has_forward_of(model, "DeepseekV2Model")
        or not is_made_of(layer, ("DeepseekV2DecoderLayer",), parts)
        or layer.use_mha
        or layer.use_sequence_parallel_moe
        # Queries are multiplied with something that depends on their positions.
        or getattr(model.config, "llama_4_scaling", None) is not None
    ):
        return None
    wrapper = layer.self_attn.mla_attn
    has_latent = wrapper.q_lora_rank is not None
    return LatentModules(
        input_norm=layer.input_layernorm,
        down=wrapper.fused_qkv_a_proj if has_latent else wrapper.kv_a_proj_with_mqa,
        query_norm=wrapper.q_a_layernorm if has_latent else None,
        queries=wrapper.q_b_proj if has_latent else wrapper.q_proj,
        latent_norm=wrapper.kv_a_layernorm,
        rotary=wrapper.rotary_emb,
        wrapper=wrapper,
        attend=wrapper.mla_attn,
        output=wrapper.o_proj,
        norm=layer.post_attention_layernorm,
        mlp=layer.mlp,
        attention=layer.self_attn,
    )

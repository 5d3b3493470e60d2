"""Layers of Qwen3-Next and Qwen3.5 that have a linear state in the place of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray_hetero.compat.models.decoder_classes import has_forward_of


@dataclass(frozen=True)
class GatedDeltaModules:
    """vLLM's modules of a layer with a Gated DeltaNet, by the part that each is."""

    input_norm: Any
    """Norm of the products' input."""
    delta: Any
    """All from the products of the input to that of the output, in one module of vLLM's."""
    norm: Any
    """Norm of the input of the MLP or the experts."""
    mlp: Any
    """MLP or experts, in one module of vLLM's."""
    is_plain_mlp: bool
    """Whether that is a gate and up, an activation, and down."""

    @property
    def linears(self) -> tuple[Any, ...]:
        """Linear layers in the order of their products, without that of the gates."""
        own = (self.delta.in_proj_qkvz, self.delta.out_proj)
        return (*own, self.mlp.gate_up_proj, self.mlp.down_proj) if self.is_plain_mlp else own

    @property
    def added(self) -> tuple[Any, ...]:
        """Linear layers whose products the ranks of a group add up."""
        own = (self.delta.out_proj,)
        return (*own, self.mlp.down_proj) if self.is_plain_mlp else own


def gated_delta_modules(model: Any, layer: Any) -> GatedDeltaModules | None:
    """The modules of a layer of a model of vLLM's; None if it computes something else."""
    if (
        not has_forward_of(model, "Qwen3NextModel")
        or not has_forward_of(layer, "Qwen3NextDecoderLayer")
        or layer.layer_type != "linear_attention"
        or layer.layer_scale
        or layer.use_attn_reduce_scatter_for_moe
    ):
        return None
    mlp = layer.mlp
    return GatedDeltaModules(
        input_norm=layer.input_layernorm,
        delta=layer.linear_attn,
        norm=layer.post_attention_layernorm,
        mlp=mlp,
        is_plain_mlp=has_forward_of(mlp, "Qwen2MoeMLP") and mlp.expert_gate is None,
    )

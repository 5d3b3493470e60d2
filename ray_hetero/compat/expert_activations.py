"""What vLLM's layers of routed experts say of their activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SaidActivation:
    """The activation of a layer, as the layer and its configuration have it."""

    value: str
    """The value of vLLM's MoEActivation."""
    limit: float | None
    alpha: float | None
    beta: float | None
    situ_limit: float | None
    situ_up_limit: float | None


def activation_of(layer: Any) -> SaidActivation:
    """The activation of a layer's experts.

    Uses: `FusedMoEConfig.swiglu_limit`, `FusedMoEConfig.swiglu_alpha`,
    `FusedMoEConfig.swiglu_beta`, `FusedMoEConfig.activation_situ_beta`,
    `FusedMoEConfig.activation_situ_linear_beta`; of the first three the layer's own go first, as
    vLLM has it.

    Args:
        layer: of `routed_experts.routed_layers`.

    """
    moe = layer.moe_config

    def said(name: str) -> float | None:
        own = getattr(layer, name, None)
        return getattr(moe, name, None) if own is None else own

    return SaidActivation(
        layer.activation.value,
        said("swiglu_limit"),
        said("swiglu_alpha"),
        said("swiglu_beta"),
        getattr(moe, "activation_situ_beta", None),
        getattr(moe, "activation_situ_linear_beta", None),
    )

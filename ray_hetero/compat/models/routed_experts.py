"""vLLM's layers of routed experts: which a model has, what computes each, what each holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def routed_layers(model: Any) -> Iterator[Any]:
    """The layers of routed experts of a model, each a `RoutedExperts` of vLLM's."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return (layer for layer in model.modules() if isinstance(layer, RoutedExperts))


def experts_of(layer: Any) -> Any:
    """The object that computes a layer's experts; None where its method has no such object.

    Uses: `FusedMoEKernel.fused_experts`.

    Args:
        layer: of `routed_layers`, its weights prepared.

    """
    kernel = getattr(layer.quant_method, "moe_kernel", None)
    return None if kernel is None else kernel.fused_experts


def number_of(layer: Any) -> int | None:
    """The number that a layer has where this package computes it; None where vLLM does.

    Args:
        layer: of `routed_layers`, its weights prepared.

    """
    return getattr(experts_of(layer), "layer_number", None)


def without_memory(tensor: torch.Tensor) -> torch.nn.Parameter:
    """A parameter of the shape and type of a tensor, all of whose elements are one 0."""
    import torch

    return torch.nn.Parameter(tensor.new_zeros(()).expand(tensor.shape), requires_grad=False)


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

"""vLLM's layers of routed experts: which a model has, what computes each, what each holds."""

from __future__ import annotations

from collections.abc import Iterator
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

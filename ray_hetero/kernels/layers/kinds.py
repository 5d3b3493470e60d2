"""Kinds of decoder layers that are an operator of their own, with a native part for each kind.

A layer with attention to keys and values is of none of these: such layers become one operator with
those that follow them (fusible_layers.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from ray_hetero.kernels.layers.gated_delta_fusion import gated_delta_layer_of
from ray_hetero.kernels.layers.latent_fusion import latent_layer_of
from ray_hetero.kernels.layers.layer_parts import Linear
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear


class LayerOperator(Protocol):
    """A layer that is computed as one operator, maybe up to its MLP or its experts."""

    def replacement(self, mlp: Any) -> nn.Module:
        """Module that takes the layer's place in vLLM's model.

        Args:
            mlp: vLLM's module that computes what comes behind; None if nothing does.

        """


class LayerKind(Protocol):
    """A kind of layers, such as those with latents or with a linear state."""

    def __call__(
        self, decoder: Any, layer: Any, linears: Mapping[nn.Module, Linear],
        kernel: StreamingLinear,
    ) -> tuple[LayerOperator, Any] | str | None:  # fmt: skip
        """Operator of a layer of this kind, and vLLM's module that comes behind it.

        Args:
            decoder: vLLM's model.
            layer: one of its layers.
            linears: linear layers that the kernel computes, by vLLM's module.
            kernel: what computes them.

        Returns:
            Why the layer is left to vLLM, if it is; None if it is of another kind.

        """


KINDS: tuple[LayerKind, ...] = (latent_layer_of, gated_delta_layer_of)


def operator_of(
    decoder: Any, layer: Any, linears: Mapping[nn.Module, Linear], kernel: StreamingLinear
) -> tuple[LayerOperator, Any] | str | None:
    """Operator of a layer of one of `KINDS`; arguments and results as of these."""
    for kind in KINDS:
        found = kind(decoder, layer, linears, kernel)
        if found is not None:
            return found
    return None

"""Routed experts by PyTorch's operators, in the type that the model is computed in.

For layers that no kernel takes: activations that vLLM's kernels for CPUs lack, in float32 or
float16, or of hidden sizes that this project's kernels cannot hold.
"""

from __future__ import annotations

from typing import Any

import torch

from ray_hetero.kernels.experts.activations import Activation
from ray_hetero.kernels.experts.experts_one_by_one import multiplied_one_by_one


class PlainExperts:
    """The experts of one layer.

    Args:
        layer: vLLM's, whose weights are loaded.
        activation: what becomes of gate and up.

    """

    def __init__(self, layer: Any, activation: Activation) -> None:
        self._w13, self._w2 = layer.w13_weight.data, layer.w2_weight.data
        self._w13_bias = getattr(layer, "w13_bias", None)
        self._w2_bias = getattr(layer, "w2_bias", None)
        self._activation = activation

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor | None, ids: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Sums over the experts of each token; arguments and result as those of `RoutedExperts`."""
        if weights is None:
            weights = torch.ones(ids.shape)
        found = multiplied_one_by_one(
            x, self._w13, self._w2, weights.float(), ids, activation=self._activation,
            count=len(self._w13), w13_bias=self._w13_bias, w2_bias=self._w2_bias,
        )  # fmt: skip
        return out.copy_(found)

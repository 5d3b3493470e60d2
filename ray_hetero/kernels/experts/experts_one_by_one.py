"""Experts of a layer multiplied one after the other by PyTorch, and in tests in the place of a GPU.

For layers that no kernel takes: activations that vLLM's kernels for CPUs lack, in float32 or
float16, or of hidden sizes that this project's kernels cannot hold.
"""

from __future__ import annotations

from typing import Any

import torch

from ray_hetero.kernels.experts.activations import Activation
from ray_hetero.kernels.experts.expert_matrices import ExpertMatrices


def multiplied_one_by_one(
    x: torch.Tensor,
    matrices: ExpertMatrices,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    activation: Activation,
    count: int,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums [M, hidden] over the experts of each token, as `compat.fused_experts` gives them.

    Args:
        x: [M, hidden].
        matrices: of the experts that are here.
        weights: [M, chosen], float32.
        ids: [M, chosen]; a negative one adds nothing.
        activation: what becomes of gate and up.
        count: experts of the layer.
        places: [count]: which of E each one is, -1 for one that is not here; None where E is all.

    """
    w13, w2, w13_bias, w2_bias = matrices
    found = torch.zeros(x.shape)
    places = torch.arange(count) if places is None else places
    for expert, place in enumerate(places.tolist()):
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        if place < 0 or not len(tokens):
            continue
        both = x[tokens].float() @ w13[place].float().t()
        if w13_bias is not None:
            both += w13_bias[place].float()
        out = activation(both).to(x.dtype).float() @ w2[place].float().t()
        if w2_bias is not None:
            out += w2_bias[place].float()
        found.index_add_(0, tokens, out * weights[tokens, choices, None])
    return found.to(x.dtype)


class PlainExperts:
    """The experts of one layer, in the type that the model is computed in.

    Args:
        layer: vLLM's, whose weights are loaded.
        activation: what becomes of gate and up.

    """

    def __init__(self, layer: Any, activation: Activation) -> None:
        self._matrices = ExpertMatrices(
            layer.w13_weight.data,
            layer.w2_weight.data,
            getattr(layer, "w13_bias", None),
            getattr(layer, "w2_bias", None),
        )
        self._activation = activation

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor | None, ids: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Sums over the experts of each token; arguments and result as those of `RoutedExperts`."""
        if weights is None:
            weights = torch.ones(ids.shape)
        found = multiplied_one_by_one(
            x, self._matrices, weights.float(), ids, activation=self._activation,
            count=len(self._matrices.w13),
        )  # fmt: skip
        return out.copy_(found)

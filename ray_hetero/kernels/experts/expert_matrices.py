"""Matrices of a layer's routed experts."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ExpertMatrices(NamedTuple):
    """Matrices of experts, with their biases if there are any."""

    w13: torch.Tensor
    """Gate and up of each expert in the activation's order, [E, 2 · inner, hidden]; without a gate
    [E, inner, hidden]."""
    w2: torch.Tensor
    """Down of each, [E, hidden, inner]."""
    w13_bias: torch.Tensor | None = None
    """[E, outputs of w13]."""
    w2_bias: torch.Tensor | None = None
    """[E, hidden]."""

"""A decoder layer of a CPU rank: its parts, and the form in which the model calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray_hetero.kernels.layers.attention import Attention
from ray_hetero.kernels.layers.layer_parts import PostAttention, QkvInput
from ray_hetero.kernels.layers.structures import Calls


@dataclass(frozen=True, eq=False)
class Layer:
    """The parts of a decoder layer."""

    input: QkvInput
    attention: Attention
    parts: PostAttention
    """Parts behind the attention, as if no layer followed."""
    calls: Calls = Calls.RESIDUAL
    """Form in which the model calls the layer."""
    mlp: Any = None
    """vLLM's module that computes what comes behind `parts`, if something does."""

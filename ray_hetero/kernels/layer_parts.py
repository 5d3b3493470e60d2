"""The parts that a decoder layer is made of, as CPU ranks compute it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ray_hetero.weight_formats import HostWeight


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear layer."""

    weight: HostWeight
    """W [N, K]."""
    bias: torch.Tensor | None
    """[N], float32."""

    @property
    def native(self) -> tuple[int, int, Any]:
        """What the native module takes: addresses of weight and bias, and the encoding."""
        bias = 0 if self.bias is None else self.bias.data_ptr()
        return self.weight.data.data_ptr(), bias, self.weight.encoding


@dataclass(frozen=True, eq=False)
class Norm:
    """A root-mean-square norm."""

    weight: torch.Tensor
    """[N], bf16."""
    epsilon: float

    @property
    def native(self) -> tuple[int, float]:
        """What the native module takes."""
        return self.weight.data_ptr(), self.epsilon


@dataclass(frozen=True, eq=False)
class QkvInput:
    """How a layer begins."""

    norm: Norm
    qkv: Linear
    """Queries, keys and values."""

    @property
    def native(self) -> tuple[Any, Any]:
        """What the native module takes."""
        return self.norm.native, self.qkv.native


@dataclass(frozen=True, eq=False)
class PostAttention:
    """What is computed from one attention to the next, in this order."""

    output: Linear
    norm: Norm
    gate_up: Linear
    down: Linear
    next: QkvInput | None = None
    """Of the layer that comes; None after the last."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All linear layers."""
        own = (self.output, self.gate_up, self.down)
        return own if self.next is None else (*own, self.next.qkv)

    @property
    def outputs(self) -> int:
        """Size of the result."""
        return self.linears[-1].weight.shape[0]

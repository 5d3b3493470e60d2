"""Activations of routed experts: what becomes of gate and up between an expert's two products.

An activation is a row of `ROWS`, by the value of vLLM's MoEActivation.  Its formula stands in
csrc/kernels/expert_activations.h for the cores, and here for everything else; a GPU calls vLLM's
operator for it with the same figures (compat/models/fused_experts.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch.nn.functional import gelu


class Order(Enum):
    """Order of an expert's outputs before its activation."""

    HALVES = "halves"
    """All of the gate, then all of up."""
    TURNS = "turns"
    """One of the gate, one of up, and so on."""
    ALONE = "alone"
    """Outputs of up alone, without a gate."""


@dataclass(frozen=True)
class Activation:
    """An activation with its figures, of which its formula uses some."""

    value: str = "silu"
    """The value of vLLM's MoEActivation, a key of `ROWS`."""
    alpha: float = 1.0
    """Factor of the gate in its sigmoid."""
    beta: float = 0.0
    """Addend of up."""
    limit: float = math.inf
    """Largest gate; of `situ` the magnitude that the gate approaches."""
    up_limit: float = math.inf
    """Largest magnitude of up; of `situ` the one that it approaches."""

    @property
    def row(self) -> Row:
        """The formula, and what it takes."""
        return ROWS[self.value]

    @property
    def order(self) -> Order:
        """Order of the outputs that it takes."""
        return self.row.order

    def __call__(self, outputs: torch.Tensor) -> torch.Tensor:
        """The activation of outputs [M, N] in its order, by torch's operators.

        Returns:
            [M, N / 2], or [M, N] without a gate.

        """
        if self.order is Order.ALONE:
            return self.row.formula(self, outputs, outputs)
        shape, axis = ((2, -1), 1) if self.order is Order.HALVES else ((-1, 2), 2)
        gate, up = outputs.unflatten(1, shape).unbind(axis)
        return self.row.formula(self, gate, up)


@dataclass(frozen=True)
class Row:
    """An activation that the kernels know."""

    native: str
    """The formula's name in csrc/kernels/layers.h."""
    formula: Callable[[Activation, torch.Tensor, torch.Tensor], torch.Tensor]
    """(activation, gate, up) → their common value; without a gate both are the same tensor."""
    order: Order = Order.HALVES
    has_limit: bool = False
    """Whether vLLM gives such layers limits of their own."""


def _swiglu(figures: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=figures.limit)
    up = up.clamp(-figures.up_limit, figures.up_limit)
    return gate * (figures.alpha * gate).sigmoid() * (up + figures.beta)


def _swiglu_step(figures: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    silu = (gate * gate.sigmoid()).clamp(max=figures.limit)
    return silu * up.clamp(-figures.up_limit, figures.up_limit)


def _situ(figures: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    limited = figures.limit * (gate / figures.limit).tanh()
    if figures.up_limit < math.inf:
        up = figures.up_limit * (up / figures.up_limit).tanh()
    return limited * gate.sigmoid() * up


_gelu_tanh = partial(gelu, approximate="tanh")

ROWS: dict[str, Row] = {
    "silu": Row("swiglu", _swiglu, has_limit=True),
    "swigluoai": Row("swiglu", _swiglu, Order.TURNS, has_limit=True),
    "swigluoai_uninterleave": Row("swiglu", _swiglu, has_limit=True),
    "swiglustep": Row("swiglu_step", _swiglu_step, has_limit=True),
    "situ": Row("situ", _situ),
    "gelu": Row("gelu_and_mul", lambda _, gate, up: gelu(gate) * up),
    "gelu_tanh": Row("gelu_tanh_and_mul", lambda _, gate, up: _gelu_tanh(gate) * up),
    "silu_no_mul": Row("silu", lambda _, _gate, up: up * up.sigmoid(), Order.ALONE),
    "gelu_no_mul": Row("gelu", lambda _, _gate, up: gelu(up), Order.ALONE),
    "gelu_tanh_no_mul": Row("gelu_tanh", lambda _, _gate, up: _gelu_tanh(up), Order.ALONE),
    "relu2_no_mul": Row("relu_squared", lambda _, _gate, up: up.clamp(min=0) ** 2, Order.ALONE),
}
"""Activations by the value of vLLM's MoEActivation.  A new one is added here."""

SILU = Activation()
"""SiLU of the gate, times up."""
SWIGLU_OAI = Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0, up_limit=7.0)
"""The activation of gpt-oss, whose figures vLLM's operator has."""
SWIGLU_STEP = Activation("swiglustep", limit=7.0, up_limit=7.0)
"""The activation of Step-3.5's limited layers, likewise."""
FIXED = {one.value: one for one in (SWIGLU_OAI, SWIGLU_STEP)}
"""Activations whose figures no layer changes."""

"""Routed experts of a mixture layer, computed by the socket in one call.

Only the experts that a step uses are read, each once, and all threads stream weights until the last
one is read (csrc/kernels/experts.h).  This module needs PyTorch and the native module, not vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Self

import torch
from torch.nn.functional import pad

from ray_hetero.kernels.experts.expert_room import MakeRoom, Room, in_lines
from ray_hetero.kernels.formats import HostWeight, PackedWeight
from ray_hetero.kernels.formats.base import pack

MULTIPLE = 32
"""Divisor of the hidden size; the inner size is filled up with zeros to such a multiple."""
HALF_BLOCK = 16
"""Outputs of the gate that are neighbours, and those of up that belong to them."""


@dataclass(frozen=True)
class Activation:
    """How gate and up become one: gate · sigmoid(alpha · gate) · (up + beta)."""

    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf
    """Largest gate, and largest magnitude of up, before that."""


SILU = Activation()
"""SiLU of the gate, times up."""
SWIGLU_OAI = Activation(alpha=1.702, beta=1.0, limit=7.0)
"""The activation of gpt-oss."""


def paired(gate_up: torch.Tensor, *, is_interleaved: bool) -> torch.Tensor:
    """Outputs of gate and up in the order of the kernel: 16 of the gate, then their 16 of up.

    Args:
        gate_up: [2 · inner, …].
        is_interleaved: whether outputs of both take turns; else all of the gate come first.

    Returns:
        [2 · inner filled up with zeros to a multiple of 64, …].

    """
    outputs, *others = gate_up.shape
    shape = (-1, 2, *others) if is_interleaved else (2, -1, *others)
    both = gate_up.reshape(shape).movedim(1 if is_interleaved else 0, 0)
    filling = -(outputs // 2) % MULTIPLE
    both = pad(both, (*(0, 0) * len(others), 0, filling))
    return both.unflatten(1, (-1, HALF_BLOCK)).transpose(0, 1).flatten(0, 2)


class RoutedExperts:
    """The experts of one layer.

    Args:
        w13: [E, 2 · inner, hidden], bf16: gate and up of each expert.
        w2: [E, hidden, inner], bf16: down of each.
        w13_bias: [E, 2 · inner], or None.
        w2_bias: [E, hidden], or None.
        native: the module of the kernels.
        level: which of its instruction sets compute.
        kind: the format that weights are held in; packed where an expert's values do not suit.
        activation: what becomes of gate and up.
        is_interleaved: whether outputs of gate and up take turns; else all of the gate come first.
        room: makes the memory for all weights.

    Raises:
        ValueError: a hidden size that is no multiple of 32.

    """

    def __init__(
        self,
        w13: torch.Tensor,
        w2: torch.Tensor,
        w13_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
        *,
        native: ModuleType,
        level: Any,
        kind: type[HostWeight] = PackedWeight,
        activation: Activation = SILU,
        is_interleaved: bool = False,
        room: MakeRoom = Room,
    ) -> None:
        count, hidden, inner = w2.shape
        if hidden % MULTIPLE:
            raise ValueError(f"experts of hidden size {hidden}: expected a multiple of {MULTIPLE}")
        filling = -inner % MULTIPLE
        elements = count * (inner + filling) * hidden
        memory = room((2 * 2 * elements, 2 * elements))

        def held(weight: torch.Tensor) -> HostWeight:
            packed = pack(weight)
            return kind.made(packed, native) or PackedWeight.made(packed, native)

        weights = [
            (
                memory.moved(held(paired(gate_up, is_interleaved=is_interleaved)), 0),
                memory.moved(held(pad(down, (0, filling))), 1),
            )
            for gate_up, down in zip(w13, w2, strict=True)
        ]
        self.room = memory
        """Memory of all weights."""
        self._take(weights, w13_bias, w2_bias, native, level, activation, is_interleaved)

    @classmethod
    def of_weights(
        cls,
        weights: Iterable[tuple[HostWeight, HostWeight]],
        count: int,
        w13_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
        *,
        native: ModuleType,
        level: Any,
        activation: Activation = SILU,
        is_interleaved: bool = False,
        room: MakeRoom = Room,
    ) -> Self:
        """Experts whose weights are in a format already.

        Args:
            weights: of each expert gate and up in the order of `paired`, and down; all of one size.
            count: how many experts.
            w13_bias: as those of the constructor, like all others.
            w2_bias: see there.
            native: see there.
            level: see there.
            activation: see there.
            is_interleaved: of the bias.
            room: makes the memory for all weights.

        """
        memory: Room | None = None
        moved = []
        for gate_up, down in weights:
            if memory is None:
                memory = room((count * in_lines(gate_up.data.nbytes),
                               count * in_lines(down.data.nbytes)))  # fmt: skip
            moved.append((memory.moved(gate_up, 0), memory.moved(down, 1)))
        assert memory is not None, "a layer has experts"
        made = cls.__new__(cls)
        made.room = memory
        made._take(moved, w13_bias, w2_bias, native, level, activation, is_interleaved)
        return made

    def _take(
        self,
        weights: list[tuple[HostWeight, HostWeight]],
        w13_bias: torch.Tensor | None,
        w2_bias: torch.Tensor | None,
        native: ModuleType,
        level: Any,
        activation: Activation,
        is_interleaved: bool,
    ) -> None:
        self.count, self.hidden = len(weights), weights[0][1].shape[0]
        self._level = level
        self._native_module = native
        self.weights = weights
        """Gate and up in one, and down, of each expert."""
        self.activation = activation
        self.is_interleaved = is_interleaved
        self.biases = (
            None
            if w13_bias is None
            else torch.stack([paired(one.float(), is_interleaved=is_interleaved)
                              for one in w13_bias]),
            None if w2_bias is None else w2_bias.float().contiguous(),
        )  # fmt: skip
        """Biases of gates and ups in the order of `paired`, and of downs, float32; or None."""
        gate_up_bias, down_bias = (0 if b is None else b.data_ptr() for b in self.biases)
        self._native = native.Experts(
            experts=[
                tuple((weight.data.data_ptr(), weight.encoding) for weight in expert)
                for expert in self.weights
            ],
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            alpha=activation.alpha,
            beta=activation.beta,
            limit=activation.limit,
        )

    @property
    def call(self) -> Any:
        """What another native module calls (csrc/expert_call.h), valid as long as this is."""
        return self._native_module.ExpertCall(self._native, self._level)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts' weights."""
        return sum(weight.data.nbytes for expert in self.weights for weight in expert)

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor | None,
        ids: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Y = Σ weight · expert(x) over the experts that were chosen for each token.

        Args:
            x: [M, hidden], bf16.
            weights: [M, chosen], float32; None adds the experts up as they are.
            ids: [M, chosen]; a negative one is an expert that is not here, and adds nothing.
            out: [M, hidden], bf16, contiguous; made if it is not given.

        Returns:
            `out`.

        Raises:
            ValueError: an expert that there is not.

        """
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
        ids = ids.to(torch.int32).contiguous()
        weights = None if weights is None else weights.float().contiguous()
        self._native.run(
            x=x.data_ptr(),
            stride=x.stride(0),
            ids=ids.data_ptr(),
            weights=0 if weights is None else weights.data_ptr(),
            y=out.data_ptr(),
            m=x.shape[0],
            chosen=ids.shape[1],
            level=self._level,
        )
        return out

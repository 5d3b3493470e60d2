"""Routed experts of a mixture layer, computed by the socket in one call.

Only the experts that a step uses are read, each once, and all threads stream weights until the last
one is read (csrc/kernels/experts.h).  This module needs PyTorch and the native module, not vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any, Self

import torch
from torch.nn.functional import pad

from ray_hetero.kernels.experts.activations import SILU, Activation, Order
from ray_hetero.kernels.experts.expert_matrices import ExpertMatrices
from ray_hetero.kernels.experts.expert_room import MakeRoom, Room, in_lines
from ray_hetero.kernels.formats import HostWeight, PackedWeight
from ray_hetero.kernels.formats.base import pack

MULTIPLE = 32
"""Divisor of the hidden size; the inner size is filled up with zeros to such a multiple."""
HALF_BLOCK = 16
"""Outputs of the gate that are neighbours, and those of up that belong to them."""


def paired(gate_up: torch.Tensor, order: Order) -> torch.Tensor:
    """Outputs of gate and up in the order of the kernel: 16 of the gate, then their 16 of up.

    Args:
        gate_up: [2 · inner, …], or without a gate [inner, …], whose order stays.
        order: of the outputs.

    Returns:
        The same with the inner size filled up with zeros to a multiple of 32.

    """
    outputs, *others = gate_up.shape
    if order is Order.ALONE:
        return pad(gate_up, (*(0, 0) * len(others), 0, -outputs % MULTIPLE))
    takes_turns = order is Order.TURNS
    shape = (-1, 2, *others) if takes_turns else (2, -1, *others)
    both = gate_up.reshape(shape).movedim(1 if takes_turns else 0, 0)
    filling = -(outputs // 2) % MULTIPLE
    both = pad(both, (*(0, 0) * len(others), 0, filling))
    return both.unflatten(1, (-1, HALF_BLOCK)).transpose(0, 1).flatten(0, 2)


class RoutedExperts:
    """The experts of one layer.

    Args:
        matrices: of all experts, in bf16.
        native: the module of the kernels.
        level: which of its instruction sets compute.
        kind: the format that weights are held in; packed where an expert's values do not suit.
        activation: what becomes of gate and up.
        room: makes the memory for all weights.

    Raises:
        ValueError: a hidden size that is no multiple of 32.

    """

    def __init__(
        self,
        matrices: ExpertMatrices,
        *,
        native: ModuleType,
        level: Any,
        kind: type[HostWeight] = PackedWeight,
        activation: Activation = SILU,
        room: MakeRoom = Room,
    ) -> None:
        w13, w2, w13_bias, w2_bias = matrices
        count, hidden, inner = w2.shape
        if hidden % MULTIPLE:
            raise ValueError(f"experts of hidden size {hidden}: expected a multiple of {MULTIPLE}")
        filling = -inner % MULTIPLE
        elements = count * (inner + filling) * hidden
        order = activation.order
        halves = 1 if order is Order.ALONE else 2
        memory = room((2 * halves * elements, 2 * elements))

        def held(weight: torch.Tensor) -> HostWeight:
            packed = pack(weight)
            return kind.made(packed, native) or PackedWeight.made(packed, native)

        weights = [
            (
                memory.moved(held(paired(gate_up, order)), 0),
                memory.moved(held(pad(down, (0, filling))), 1),
            )
            for gate_up, down in zip(w13, w2, strict=True)
        ]
        self.room = memory
        """Memory of all weights."""
        self._take(weights, w13_bias, w2_bias, native, level, activation)

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
        return cls.in_room(
            memory, moved, w13_bias, w2_bias, native=native, level=level, activation=activation
        )

    @classmethod
    def in_room(
        cls,
        room: Room,
        weights: list[tuple[HostWeight, HostWeight]],
        w13_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
        *,
        native: ModuleType,
        level: Any,
        activation: Activation = SILU,
    ) -> Self:
        """Experts whose weights are where they stay; see `of_weights`."""
        made = cls.__new__(cls)
        made.room = room
        made._take(weights, w13_bias, w2_bias, native, level, activation)
        return made

    def _take(
        self,
        weights: list[tuple[HostWeight, HostWeight]],
        w13_bias: torch.Tensor | None,
        w2_bias: torch.Tensor | None,
        native: ModuleType,
        level: Any,
        activation: Activation,
    ) -> None:
        self.count, self.hidden = len(weights), weights[0][1].shape[0]
        self._level = level
        self._native_module = native
        self.weights = weights
        """Gate and up in one, and down, of each expert."""
        self.activation = activation
        self.biases = (
            None
            if w13_bias is None
            else torch.stack([paired(one.float(), activation.order) for one in w13_bias]),
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
            activation=activation.row.native,
            alpha=activation.alpha,
            beta=activation.beta,
            limit=activation.limit,
            up_limit=activation.up_limit,
        )

    @property
    def call(self) -> Any:
        """Function for another native module (csrc/expert_call.h); valid while this object is."""
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

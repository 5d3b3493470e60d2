"""Slices of experts as they are stored, expanded to bf16 and put together on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ray_hetero.kernels.experts.activations import Activation, Order
from ray_hetero.kernels.experts.routed_experts import HALF_BLOCK
from ray_hetero.offload.expand.expansions import expansion_of
from ray_hetero.offload.expand.stacks import Expansion, Stack
from ray_hetero.offload.experts.expert_pieces import WHOLE, Part, Run
from ray_hetero.offload.experts.linked_experts import Half, LinkedSlice
from ray_hetero.planning.prefill_memory import BF16_BYTES, EXPANSION_BYTES, ExpertSizes

Biases = tuple[torch.Tensor | None, torch.Tensor | None]
"""[experts, outputs of gate and up] in the order of the activation, and [experts, hidden], bf16."""


@dataclass(frozen=True, eq=False)
class LinkedLayer:
    """A layer's slices, and what of it stays on the GPU."""

    slices: tuple[LinkedSlice, ...]
    expansions: tuple[tuple[tuple[Stack, Expansion], ...], ...]
    """Expansions of each half of each slice."""
    biases: Biases

    @classmethod
    def of(cls, slices: tuple[LinkedSlice, ...], device: torch.device) -> LinkedLayer:
        """A layer for a GPU."""
        expansions = tuple(
            tuple((stack, expansion_of(stack, device)) for stack in half.stacks)
            for one in slices
            for half in one.halves
        )
        return cls(slices, expansions, _biases_of(slices, device))

    @property
    def halves(self) -> tuple[Half, ...]:
        """Halves of all slices, one after the other."""
        return tuple(half for one in self.slices for half in one.halves)

    @property
    def count(self) -> int:
        """Number of experts."""
        return self.slices[0].count

    @property
    def activation(self) -> Activation:
        """Activation of gate and up."""
        return self.slices[0].activation

    @property
    def inner(self) -> int:
        """Inner size of one slice."""
        return self.slices[0].halves[1].shape[1]

    @property
    def outputs(self) -> int:
        """Outputs of gate and up of one slice."""
        return self.slices[0].halves[0].shape[0]

    @property
    def hidden(self) -> int:
        """Size of a token."""
        return self.slices[0].halves[0].shape[1]


class ExpertExpansion:
    """Memory of a GPU for the experts of a piece in bf16, which every piece overwrites.

    Args:
        device: the GPU.
        layers: of which pieces are.
        sizes: of their experts.
        experts: of a piece.

    """

    def __init__(
        self,
        device: torch.device,
        layers: Sequence[Sequence[LinkedSlice]],
        sizes: ExpertSizes,
        experts: int,
    ) -> None:
        self._experts = experts

        def memory(elements: int) -> torch.Tensor:
            return torch.empty(elements, dtype=torch.bfloat16, device=device)

        # What lies there until the first experts come is multiplied with no token.
        self._w13, self._w2 = (
            memory(experts * max(_elements(slices, half) for slices in layers)) for half in range(2)
        )
        self._some = memory(max(EXPANSION_BYTES, sizes.largest) // BF16_BYTES)
        starts, end = [], 0
        for rank in range(len(layers[0])):
            for half in range(2):
                starts.append(end)
                end += experts * max(slices[rank].halves[half].most_bytes for slices in layers)
        self.starts = tuple(starts)
        """Offset in bytes of each half of each slice in memory that has a piece as it is stored."""
        self.stored_bytes = end
        """Bytes of the memory that has a piece as it is stored."""

    def expanded(
        self, layer: LinkedLayer, stored: torch.Tensor, runs: Sequence[Run]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gates and ups [E, outputs, hidden], and downs, in bf16.

        E is of every piece the same, as the settings of kernels depend on it.

        Args:
            layer: of which the piece is.
            stored: bytes, [`stored_bytes`].
            runs: of the piece.

        """
        ranks, hidden, inner = len(layer.slices), layer.hidden, layer.inner
        shape = (self._experts, ranks * layer.outputs, hidden)
        w13 = self._w13[: shape[0] * shape[1] * shape[2]].view(shape)
        wide = ranks * inner
        w2 = self._w2[: self._experts * hidden * wide].view(self._experts, hidden, wide)
        parts = zip(layer.halves, layer.expansions, self.starts, strict=True)
        for number, (half, expansions, start) in enumerate(parts):
            rank, is_down = divmod(number, 2)
            for place, weights in self._expand(half, expansions, stored[start:], runs):
                where = slice(place, place + len(weights))
                if is_down:
                    w2[where, :, rank * inner : (rank + 1) * inner] = weights
                else:
                    put_gate_up(w13[where], weights, rank, ranks, layer.activation.order)
        return w13, w2

    def _expand(
        self,
        half: Half,
        expansions: Sequence[tuple[Stack, Expansion]],
        stored: torch.Tensor,
        runs: Sequence[Run],
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Weights of a piece in bf16, each time as many as there is room for.

        Yields:
            The place of the first one in the piece, and [weights, outputs, inputs], which the next
            ones overwrite.

        """
        outputs, inputs = half.shape
        most = self._some.numel() // (outputs * inputs)
        place = at = 0
        for first, last in runs:
            for stack, expansion in expansions:
                begin, end = max(first, stack.first), min(last, stack.last)
                each = half.begin(stack.first + 1) - half.begin(stack.first)
                for some in range(begin, end, most):
                    count = min(most, end - some)
                    rows = stored[at : at + count * each].view(count, each)[:, : stack.nbytes]
                    weights = self._some[: count * outputs * inputs]
                    expansion(rows.contiguous().view(-1), weights, some - stack.first)
                    yield place, weights.view(count, outputs, inputs)
                    place, at = place + count, at + count * each

    def biases_of(self, layer: LinkedLayer, runs: Sequence[Run]) -> Biases:
        """The biases of a piece, as many as `expanded` has experts."""

        def some(bias: torch.Tensor) -> torch.Tensor:
            chosen = torch.cat([bias[first:last] for first, last in runs])
            return torch.nn.functional.pad(chosen, (0, 0, 0, self._experts - len(chosen)))

        w13_bias, w2_bias = layer.biases
        if w13_bias is None or w2_bias is None:
            return None, None
        return some(w13_bias), some(w2_bias)


def _biases_of(slices: Sequence[LinkedSlice], device: torch.device) -> Biases:
    """Biases of all slices together: gates and ups side by side, downs added up."""
    gate_ups = [one.biases[0] for one in slices if one.biases[0] is not None]
    downs = [one.biases[1] for one in slices if one.biases[1] is not None]
    if len(gate_ups) < len(slices) or len(downs) < len(slices):
        return None, None
    count, outputs = gate_ups[0].shape
    both = torch.empty(count, len(slices) * outputs)
    for rank, bias in enumerate(gate_ups):
        put_gate_up(both, bias, rank, len(slices), slices[0].activation.order)
    w13_bias, w2_bias = (
        bias.to(device, torch.bfloat16) for bias in (both, torch.stack(downs).sum(0))
    )
    return w13_bias, w2_bias


def sizes_of(layers: Sequence[Sequence[LinkedSlice]], part: Part = WHOLE) -> ExpertSizes:
    """Bytes of a GPU that an expert of a part of these layers takes."""
    halves = [[half for one in slices for half in one.halves] for slices in layers]
    stacks = [stack for some in halves for half in some for stack in half.stacks]
    return ExpertSizes(
        count=max(len(part.block(slices[0].count)) for slices in layers),
        stored=sum(max(half.most_bytes for half in same) for same in zip(*halves, strict=True)),
        expanded=BF16_BYTES
        * sum(max(_elements(slices, half) for slices in layers) for half in range(2)),
        largest=BF16_BYTES * max(stack.shape[0] * stack.shape[1] for stack in stacks),
        tables=sum(stack.table_bytes for stack in stacks),
    )


def _elements(slices: Sequence[LinkedSlice], half: int) -> int:
    """Elements of one expert's gates and ups, or downs, all slices together."""
    outputs, inputs = slices[0].halves[half].shape
    return len(slices) * outputs * inputs


def put_gate_up(
    into: torch.Tensor, given: torch.Tensor, rank: int, ranks: int, order: Order
) -> None:
    """Put a slice's gates and ups where an activation finds them.

    Args:
        into: [E, outputs of all slices, …] in that order.
        given: [E, outputs of one, …], in the order of `routed_experts.paired`.
        rank: which slice.
        ranks: how many there are.
        order: of gates and ups, which the activation wants.

    """
    if order is Order.ALONE:
        into.unflatten(1, (ranks, -1))[:, rank].copy_(given)
        return
    blocks = given.unflatten(1, (-1, 2, HALF_BLOCK))
    if order is Order.TURNS:
        into.unflatten(1, (ranks, -1, HALF_BLOCK, 2))[:, rank].copy_(blocks.transpose(2, 3))
    else:
        into.unflatten(1, (2, ranks, -1, HALF_BLOCK))[:, :, rank].copy_(blocks.transpose(1, 2))

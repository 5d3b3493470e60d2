"""A GPU that computes experts which lie on expert ranks, in steps of many tokens.

A step of many tokens uses nearly all experts of a layer, whose weights cross the link in the time
that it takes whatever the number of tokens; the sockets' time grows with it.  The GPU reads the
weights from the expert ranks' memory as they are stored, page-locked, piece by piece and ahead of
their use (expert_pieces.py), expands them to bf16, puts the ranks' slices together, and multiplies
with vLLM's kernel for experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from placement.units import GIB
from ray_hetero.compat.fused_experts import fused_experts
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.expert_pieces import ExpertReader, Piece, Run, runs_of
from ray_hetero.kernels.experts import HALF_BLOCK
from ray_hetero.kernels.linked_experts import Half, LinkedSlice, check
from ray_hetero.planning.prefill_memory import (
    BF16_BYTES,
    EXPANSION_BYTES,
    EXPERT_WORK_BYTES,
    ExpertSizes,
)
from ray_hetero.runtime.locked_pages import lock_pages
from ray_hetero.weight_formats.base import StackExpansion
from ray_hetero.weight_formats.stacks import Stack

UNUSED = 0.05
"""Share of a layer's experts from which on those that no token has chosen are left out, as expected
of even choices: to look costs a wait for the GPU, once a layer."""
LEAST_TOKENS = 256
"""Of a chunk whose intermediate results have room."""
INTERLEAVED = "swigluoai"
"""The activation that wants outputs of gate and up in turns."""
Multiply = Callable[..., torch.Tensor]
"""As `fused_experts`."""


@dataclass(frozen=True, eq=False)
class _Layer:
    """A layer, and what of it stays on the GPU."""

    slices: tuple[LinkedSlice, ...]
    expansions: tuple[tuple[tuple[Stack, StackExpansion], ...], ...]
    """Of each half of each slice."""
    w13_bias: torch.Tensor | None
    """[experts, 2 · inner], bf16, in the order of the activation."""
    w2_bias: torch.Tensor | None
    pieces: tuple[Piece, ...]
    """With all experts."""

    @property
    def count(self) -> int:
        return self.slices[0].count

    @property
    def is_interleaved(self) -> bool:
        return self.slices[0].activation == INTERLEAVED

    @property
    def inner(self) -> int:
        """Of one slice."""
        return self.slices[0].halves[1].shape[1]

    @property
    def hidden(self) -> int:
        return self.slices[0].halves[0].shape[1]


class GpuExperts:
    """Computes layers of experts from weights that it reads over the link.

    Args:
        device: the GPU; for tests the CPU, with the same sequence of copies and products.
        layers: slices of each layer by the number of the expert rank; None is a layer of others.
        chosen: experts of a token, the most of all layers.
        budget: bytes of the GPU that may be taken.

    Raises:
        UnsupportedError: the budget is too small, the GPU has no memory left, or the pages of the
            host cannot be locked.
        AgreementError: the slices of a layer have different shapes.

    """

    def __init__(
        self,
        device: torch.device,
        layers: Sequence[Sequence[LinkedSlice] | None],
        chosen: int,
        budget: int,
    ) -> None:
        self.device = device
        """Where it computes."""
        given = [tuple(slices) for slices in layers if slices is not None]
        for slices in given:
            check(slices)
        sizes = sizes_of(given)
        self.experts = sizes.experts_of_a_piece(budget)
        """Of a piece."""
        if not self.experts:
            raise UnsupportedError(
                f"{(sizes.beside + sizes.each) / GIB:.2f} GiB of the GPU are the least for that: "
                f"{sizes.beside / GIB:.2f} beside, and {sizes.each / GIB:.2f} for one expert, but "
                f"experts.prefill_gpu_gib is {budget / GIB:.2f}"
            )
        self.gpu_bytes = sizes.gpu_bytes(self.experts)
        """Bytes of the GPU that this takes."""
        try:
            self._lock_pages(given)
            self._allocate(given, sizes, chosen)
            self._layers = self._prepared(layers)
        except RuntimeError as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise UnsupportedError(
                f"{self.gpu_bytes / GIB:.2f} GiB of the GPU and pages of the host that can be "
                f"locked are needed for that: {reason}"
            ) from None

    def _lock_pages(self, layers: Sequence[Sequence[LinkedSlice]]) -> None:
        if self.device.type != "cuda":
            return
        for half in (half for slices in layers for one in slices for half in one.halves):
            lock_pages(half.memory)

    def _allocate(
        self, layers: Sequence[Sequence[LinkedSlice]], sizes: ExpertSizes, chosen: int
    ) -> None:
        device = self.device
        module: Any = torch.cuda if device.type == "cuda" else torch.cpu
        self._module = module
        starts, end = [], 0
        for rank in range(len(layers[0])):
            for half in range(2):
                starts.append(end)
                end += self.experts * max(s[rank].halves[half].most_bytes for s in layers)
        self._starts = tuple(starts)
        self._reader = ExpertReader(device, module, starts, end)

        def memory(elements: int) -> torch.Tensor:
            return torch.empty(elements, dtype=torch.bfloat16, device=device)

        # What lies there until the first experts come is multiplied with no token.
        self._w13, self._w2 = (
            memory(self.experts * max(_elements(slices, half) for slices in layers))
            for half in range(2)
        )
        self._expanded = memory(max(EXPANSION_BYTES, sizes.largest) // BF16_BYTES)
        outputs, inputs = layers[0][0].halves[0].shape
        wide = outputs * len(layers[0])
        of_a_token = BF16_BYTES * chosen * (max(wide, inputs) + wide // 2)
        self._chunk = max(LEAST_TOKENS, EXPERT_WORK_BYTES // of_a_token)
        count = max(slices[0].count for slices in layers)
        is_gpu = device.type == "cuda"
        self._used = torch.zeros(count, dtype=torch.uint8, device=device)
        self._used_here = torch.zeros(count, dtype=torch.uint8, pin_memory=is_gpu)
        self._looked = module.Event()
        self._multiply: Multiply = fused_experts if is_gpu else multiplied_one_by_one

    def _prepared(self, layers: Sequence[Sequence[LinkedSlice] | None]) -> dict[int, _Layer]:
        found: dict[int, _Layer] = {}
        before: Piece | None = None
        for number, given in enumerate(layers):
            if given is None:
                before = None
                continue
            slices = tuple(given)
            count = slices[0].count
            groups = [
                range(begin, min(begin + self.experts, count))
                for begin in range(0, count, self.experts)
            ]
            pieces = self._pieces(slices, groups)
            if before is not None:
                before.after = pieces[0]
            before = pieces[-1]
            expansions = tuple(
                tuple((stack, stack.expansion(self.device)) for stack in half.stacks)
                for one in slices
                for half in one.halves
            )
            found[number] = _Layer(slices, expansions, *self._biases(slices), pieces)
        return found

    def _pieces(
        self, slices: tuple[LinkedSlice, ...], groups: Sequence[Sequence[int]]
    ) -> tuple[Piece, ...]:
        """Pieces of these experts, each with what comes after it."""
        pieces = []
        for experts in groups:
            places = None
            if len(experts) < slices[0].count:
                here = torch.full((slices[0].count,), -1, dtype=torch.int32)
                here[list(experts)] = torch.arange(len(experts), dtype=torch.int32)
                places = here.to(self.device)
            pieces.append(Piece(slices, runs_of(experts), places))
        for piece, after in itertools.pairwise(pieces):
            piece.after = after
        return tuple(pieces)

    def _biases(
        self, slices: Sequence[LinkedSlice]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of all slices together: gates and ups side by side, downs added up."""
        gate_ups = [one.biases[0] for one in slices if one.biases[0] is not None]
        downs = [one.biases[1] for one in slices if one.biases[1] is not None]
        if len(gate_ups) < len(slices) or len(downs) < len(slices):
            return None, None
        count, outputs = gate_ups[0].shape
        both = torch.empty(count, len(slices) * outputs)
        for rank, bias in enumerate(gate_ups):
            put_gate_up(
                both, bias, rank, len(slices),
                is_interleaved=slices[0].activation == INTERLEAVED,
            )  # fmt: skip
        w13_bias, w2_bias = (
            bias.to(self.device, torch.bfloat16) for bias in (both, torch.stack(downs).sum(0))
        )
        return w13_bias, w2_bias

    def __contains__(self, layer: int) -> bool:
        return layer in self._layers

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' experts in the host's memory."""
        return sum(one.nbytes for layer in self._layers.values() for one in layer.slices)

    def begin(self, ids: torch.Tensor, layer: int) -> None:
        """Order what a layer's `sums` will read, before its tokens are known.

        Args:
            ids: as for `sums`.
            layer: its number.

        """
        asked = self._layers[layer]
        if not self._looks(ids, asked):
            self._reader.expect(asked.pieces[0])
            return
        used = self._used[: asked.count].zero_()
        used.scatter_(0, ids.clamp(min=0).flatten().long(), 1)
        self._used_here[: asked.count].copy_(used, non_blocking=True)
        self._looked.record(self._stream())

    def sums(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Sums [M, hidden] over the experts of each token; behind `begin` of the same.

        Args:
            x: [M, hidden], bf16.
            weights: [M, chosen], float32.
            ids: [M, chosen]; a negative one is none, and adds nothing.
            layer: its number.

        """
        asked = self._layers[layer]
        pieces = self._used_pieces(asked) if self._looks(ids, asked) else asked.pieces
        x, is_none = x.contiguous(), ids < 0
        weights = weights.float().masked_fill(is_none, 0)
        ids = ids.masked_fill(is_none, 0)
        found = torch.empty_like(x)
        # One piece has all that a token wants; sums of several are rounded once.
        total = found if len(pieces) == 1 else torch.zeros(x.shape, device=x.device)
        for piece in pieces:
            w13, w2 = self._read(asked, piece)
            biases = self._biases_of(asked, piece)
            for begin in range(0, len(x), self._chunk):
                rows = slice(begin, begin + self._chunk)
                part = self._multiply(
                    x[rows], w13, w2, weights[rows], ids[rows],
                    activation=asked.slices[0].activation, count=asked.count,
                    places=piece.places, w13_bias=biases[0], w2_bias=biases[1],
                )  # fmt: skip
                if total is found:
                    found[rows] = part
                else:
                    total[rows] += part
        return found if total is found else found.copy_(total)

    def _looks(self, ids: torch.Tensor, layer: _Layer) -> bool:
        """Whether so few tokens are expected to leave experts out that are worth it."""
        tokens, chosen = ids.shape
        unused: float = (1 - chosen / layer.count) ** tokens
        return unused > UNUSED

    def _used_pieces(self, layer: _Layer) -> tuple[Piece, ...]:
        self._looked.synchronize()
        used = self._used_here[: layer.count].nonzero().flatten().tolist()
        groups = [used[at : at + self.experts] for at in range(0, len(used), self.experts)]
        return self._pieces(layer.slices, groups)

    def _stream(self) -> Any:
        return self._module.current_stream()

    def _read(self, layer: _Layer, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        """Gates and ups [E, 2 · inner, hidden], and downs, of a piece, in bf16.

        E is of every piece the same, as the kernel's settings depend on it.
        """
        ranks, hidden, inner = len(layer.slices), layer.hidden, layer.inner
        shape = (self.experts, 2 * ranks * inner, hidden)
        w13 = self._w13[: shape[0] * shape[1] * shape[2]].view(shape)
        w2 = self._w2[: w13.numel() // 2].view(self.experts, hidden, ranks * inner)
        slot = self._reader.next(piece, self._stream())
        halves = [half for one in layer.slices for half in one.halves]
        parts = zip(halves, layer.expansions, self._starts, strict=True)
        for number, (half, expansions, start) in enumerate(parts):
            rank, is_down = divmod(number, 2)
            for place, weights in self._expand(half, expansions, slot.memory[start:], piece.runs):
                where = slice(place, place + len(weights))
                if is_down:
                    w2[where, :, rank * inner : (rank + 1) * inner] = weights
                else:
                    put_gate_up(
                        w13[where], weights, rank, ranks, is_interleaved=layer.is_interleaved
                    )
        self._reader.give_back(slot, self._stream())
        return w13, w2

    def _expand(
        self,
        half: Half,
        expansions: Sequence[tuple[Stack, StackExpansion]],
        stored: torch.Tensor,
        runs: Sequence[Run],
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Weights of a piece in bf16, each time as many as there is room for.

        Yields:
            The place of the first one in the piece, and [weights, outputs, inputs], which the next
            ones overwrite.

        """
        outputs, inputs = half.shape
        most = self._expanded.numel() // (outputs * inputs)
        place = at = 0
        for first, last in runs:
            for stack, expansion in expansions:
                begin, end = max(first, stack.first), min(last, stack.last)
                each = half.begin(stack.first + 1) - half.begin(stack.first)
                for some in range(begin, end, most):
                    count = min(most, end - some)
                    rows = stored[at : at + count * each].view(count, each)[:, : stack.nbytes]
                    weights = self._expanded[: count * outputs * inputs]
                    expansion(rows.contiguous().view(-1), some - stack.first, weights)
                    yield place, weights.view(count, outputs, inputs)
                    place, at = place + count, at + count * each

    def _biases_of(
        self, layer: _Layer, piece: Piece
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if layer.w13_bias is None or layer.w2_bias is None:
            return None, None
        chosen = [
            torch.cat([bias[first:last] for first, last in piece.runs])
            for bias in (layer.w13_bias, layer.w2_bias)
        ]
        missing = self.experts - len(chosen[0])
        w13_bias, w2_bias = (torch.nn.functional.pad(bias, (0, 0, 0, missing)) for bias in chosen)
        return w13_bias, w2_bias


def sizes_of(layers: Sequence[Sequence[LinkedSlice]]) -> ExpertSizes:
    """What an expert of these layers takes of a GPU."""
    halves = [[half for one in slices for half in one.halves] for slices in layers]
    stacks = [stack for some in halves for half in some for stack in half.stacks]
    return ExpertSizes(
        count=max(slices[0].count for slices in layers),
        stored=sum(max(half.most_bytes for half in same) for same in zip(*halves, strict=True)),
        expanded=BF16_BYTES
        * sum(max(_elements(slices, half) for slices in layers) for half in range(2)),
        largest=BF16_BYTES * max(stack.shape[0] * stack.shape[1] for stack in stacks),
        tables=sum(stack.table_bytes for stack in stacks),
    )


def _elements(slices: Sequence[LinkedSlice], half: int) -> int:
    """Of one expert's gates and ups, or downs, all slices together."""
    outputs, inputs = slices[0].halves[half].shape
    return len(slices) * outputs * inputs


def put_gate_up(
    into: torch.Tensor, given: torch.Tensor, rank: int, ranks: int, *, is_interleaved: bool
) -> None:
    """Put a slice's gates and ups where an activation finds them.

    Args:
        into: [E, 2 · inner of all slices, …]: all gates first, or gates and ups in turns.
        given: [E, 2 · inner of one, …], in the order of `experts.paired`.
        rank: which slice.
        ranks: how many there are.
        is_interleaved: whether they take turns.

    """
    blocks = given.unflatten(1, (-1, 2, HALF_BLOCK))
    if is_interleaved:
        into.unflatten(1, (ranks, -1, HALF_BLOCK, 2))[:, rank].copy_(blocks.transpose(2, 3))
    else:
        into.unflatten(1, (2, ranks, -1, HALF_BLOCK))[:, :, rank].copy_(blocks.transpose(1, 2))


def multiplied_one_by_one(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    activation: str,
    count: int,
    places: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `fused_experts` computes, one expert after the other, where there is no GPU."""
    found = torch.zeros(x.shape)
    places = torch.arange(count) if places is None else places
    for expert, place in enumerate(places.tolist()):
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        if place < 0 or not len(tokens):
            continue
        both = x[tokens].float() @ w13[place].float().t()
        if w13_bias is not None:
            both += w13_bias[place].float()
        if activation == INTERLEAVED:
            gate, up = both.unflatten(1, (-1, 2)).unbind(2)
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
            between = gate * torch.sigmoid(1.702 * gate) * up
        else:
            gate, up = both.chunk(2, dim=1)
            between = torch.nn.functional.silu(gate) * up
        out = between.to(x.dtype).float() @ w2[place].float().t()
        if w2_bias is not None:
            out += w2_bias[place].float()
        found.index_add_(0, tokens, out * weights[tokens, choices, None])
    return found.to(x.dtype)

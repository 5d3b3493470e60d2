"""A GPU that computes experts which lie on expert ranks, in steps of many tokens.

A step of many tokens uses nearly all experts of a layer, whose weights cross the link in the time
that it takes whatever the number of tokens; the sockets' time grows with it.  The GPU reads the
weights from the expert ranks' memory as they are stored, page-locked, piece by piece and ahead of
their use (expert_pieces.py), expands them to bf16, puts the ranks' slices together, and multiplies
with vLLM's kernel for experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from placement.units import GIB
from ray_hetero.compat.fused_experts import fused_experts
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.expert_expansion import ExpertExpansion, LinkedLayer, sizes_of
from ray_hetero.kernels.expert_pieces import ExpertReader, Piece, runs_of
from ray_hetero.kernels.experts_one_by_one import multiplied_one_by_one
from ray_hetero.kernels.linked_experts import LinkedSlice, check
from ray_hetero.planning.prefill_memory import BF16_BYTES, EXPERT_WORK_BYTES, ExpertSizes
from ray_hetero.runtime.locked_pages import lock_pages

UNUSED = 0.05
"""Share of a layer's experts from which on those that no token has chosen are left out, as expected
of even choices: to look costs a wait for the GPU, once a layer."""
LEAST_TOKENS = 256
"""Of a chunk whose intermediate results have room."""
Multiply = Callable[..., torch.Tensor]
"""As `fused_experts`."""


@dataclass(frozen=True, eq=False)
class _Layer:
    linked: LinkedLayer
    pieces: tuple[Piece, ...]
    """With all experts."""


class GpuExperts:
    """Computes layers of experts from weights that it reads over the link.

    Args:
        device: the GPU; for tests the CPU, with the same sequence of copies and products.
        layers: slices of each layer by the number of the expert rank; None is a layer of others.
        chosen: experts of a token, the most of all layers.
        budget_gib: memory of the GPU that may be taken, in GiB, or auto.

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
        budget_gib: float | Literal["auto"],
    ) -> None:
        self.device = device
        """Where it computes."""
        given = [tuple(slices) for slices in layers if slices is not None]
        for slices in given:
            check(slices)
        sizes = sizes_of(given)
        budget = sizes.budget(budget_gib)
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
        self._expansion = ExpertExpansion(device, layers, sizes, self.experts)
        starts, nbytes = self._expansion.starts, self._expansion.stored_bytes
        self._reader = ExpertReader(device, module, starts, nbytes)
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
            found[number] = _Layer(LinkedLayer.of(slices, self.device), pieces)
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

    def __contains__(self, layer: int) -> bool:
        return layer in self._layers

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' experts in the host's memory."""
        return sum(one.nbytes for layer in self._layers.values() for one in layer.linked.slices)

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
        count = asked.linked.count
        used = self._used[:count].zero_()
        used.scatter_(0, ids.clamp(min=0).flatten().long(), 1)
        self._used_here[:count].copy_(used, non_blocking=True)
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
        linked = asked.linked
        pieces = self._used_pieces(asked) if self._looks(ids, asked) else asked.pieces
        x, is_none = x.contiguous(), ids < 0
        weights = weights.float().masked_fill(is_none, 0)
        ids = ids.masked_fill(is_none, 0)
        found = torch.empty_like(x)
        # One piece has all that a token wants; sums of several are rounded once.
        total = found if len(pieces) == 1 else torch.zeros(x.shape, device=x.device)
        for piece in pieces:
            w13, w2 = self._read(linked, piece)
            w13_bias, w2_bias = self._expansion.biases_of(linked, piece.runs)
            for begin in range(0, len(x), self._chunk):
                rows = slice(begin, begin + self._chunk)
                part = self._multiply(
                    x[rows], w13, w2, weights[rows], ids[rows],
                    activation=linked.activation, count=linked.count,
                    places=piece.places, w13_bias=w13_bias, w2_bias=w2_bias,
                )  # fmt: skip
                if total is found:
                    found[rows] = part
                else:
                    total[rows] += part
        return found if total is found else found.copy_(total)

    def _looks(self, ids: torch.Tensor, layer: _Layer) -> bool:
        """Whether so few tokens are expected to leave experts out that are worth it."""
        tokens, chosen = ids.shape
        unused: float = (1 - chosen / layer.linked.count) ** tokens
        return unused > UNUSED

    def _used_pieces(self, layer: _Layer) -> tuple[Piece, ...]:
        self._looked.synchronize()
        used = self._used_here[: layer.linked.count].nonzero().flatten().tolist()
        groups = [used[at : at + self.experts] for at in range(0, len(used), self.experts)]
        return self._pieces(layer.linked.slices, groups)

    def _stream(self) -> Any:
        return self._module.current_stream()

    def _read(self, layer: LinkedLayer, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        """Gates and ups of a piece, and downs, in bf16."""
        slot = self._reader.next(piece, self._stream())
        found = self._expansion.expanded(layer, slot.memory, piece.runs)
        self._reader.give_back(slot, self._stream())
        return found

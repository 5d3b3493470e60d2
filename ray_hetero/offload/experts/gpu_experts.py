"""A GPU that computes experts which lie on expert ranks, in steps of many tokens.

A step of many tokens uses nearly all experts of a layer, whose weights cross the link in the time
that it takes whatever the number of tokens; the sockets' time grows with it.  The GPU reads the
weights from the expert ranks' memory as they are stored, page-locked, piece by piece and ahead of
their use (expert_pieces.py), expands them to bf16, puts the ranks' slices together, and multiplies
with vLLM's kernel for experts.  It may do so for some of a layer's experts only, while the sockets
compute the others.  Where a stage has several GPUs, each reads a part of every layer over its own
link, and the stage adds their sums up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from placement.units import GIB
from ray_hetero.compat.models.fused_experts import fused_experts, kernel_tokens
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.experts.expert_matrices import ExpertMatrices
from ray_hetero.kernels.experts.experts_one_by_one import multiplied_one_by_one
from ray_hetero.offload.experts.expert_expansion import ExpertExpansion, LinkedLayer, sizes_of
from ray_hetero.offload.experts.expert_pieces import WHOLE, ExpertPieces, ExpertReader, Part, Piece
from ray_hetero.offload.experts.linked_experts import LinkedSlice, check
from ray_hetero.planning.prefill_memory import BF16_BYTES, EXPERT_WORK_BYTES, ExpertSizes

UNUSED = 0.05
"""Share of a layer's experts from which on those that no token has chosen are left out, as expected
of even choices: to look costs a wait for the GPU, once a layer."""
LEAST_TOKENS = 256
"""Least tokens of a chunk, for whose intermediate results there is room."""
Multiply = Callable[..., torch.Tensor]
"""Function with the arguments and the result of `multiplied_one_by_one`."""


class GpuExperts:
    """Computes layers of experts from weights that it reads over the link.

    Args:
        device: the GPU; for tests the CPU, with the same sequence of copies and products.
        layers: slices of each layer by the number of the expert rank; None is a layer of others.
        chosen: experts of a token, the most of all layers.
        budget_gib: memory of the GPU that may be taken, in GiB, or auto.
        part: of every layer's experts, that this GPU reads.

    Raises:
        UnsupportedError: the budget is too small, a layer has fewer experts than there are GPUs,
            the GPU has no memory left, or the pages of the host cannot be locked.
        AgreementError: the slices of a layer have different shapes.

    """

    def __init__(
        self,
        device: torch.device,
        layers: Sequence[Sequence[LinkedSlice] | None],
        chosen: int,
        budget_gib: float | Literal["auto"],
        part: Part = WHOLE,
    ) -> None:
        self.device = device
        """Device that computes the experts."""
        given = [tuple(slices) for slices in layers if slices is not None]
        for slices in given:
            check(slices)
        self.part = part
        """Part of every layer's experts that is read here."""
        least = min((slices[0].count for slices in given), default=part.size)
        if least < part.size:
            raise UnsupportedError(
                f"a layer has {least} experts, fewer than the {part.size} GPUs of the stage"
            )
        sizes = sizes_of(given, part)
        budget = sizes.budget(budget_gib)
        self.experts = sizes.experts_of_a_piece(budget)
        """Experts of a piece."""
        if not self.experts:
            raise UnsupportedError(
                f"this needs at least {(sizes.beside + sizes.each) / GIB:.2f} GiB of the GPU, "
                f"{sizes.each / GIB:.2f} for one expert and {sizes.beside / GIB:.2f} for all else, "
                f"but experts.prefill_gpu_gib is {budget / GIB:.2f}"
            )
        self._pieces = ExpertPieces(
            device, [None if one is None else tuple(one) for one in layers], self.experts, part
        )
        self._all = sizes.count
        self.gpu_bytes = sizes.gpu_bytes(self.experts)
        """Bytes of the GPU that this takes."""
        try:
            self._lock_pages(given)
            self._allocate(given, sizes, chosen)
            self._layers = {
                number: LinkedLayer.of(tuple(slices), device)
                for number, slices in enumerate(layers)
                if slices is not None
            }
        except RuntimeError as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise UnsupportedError(
                f"this needs {self.gpu_bytes / GIB:.2f} GiB of the GPU and page-locked memory of "
                f"the host: {reason}"
            ) from None

    def _lock_pages(self, layers: Sequence[Sequence[LinkedSlice]]) -> None:
        if self.device.type != "cuda":
            return
        for one in (one for slices in layers for one in slices):
            block = self.part.block(one.count)
            one.lock(block)

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
        inner = layers[0][0].halves[1].shape[1] * len(layers[0])
        of_a_token = BF16_BYTES * chosen * (max(wide, inputs) + inner)
        self._chunk = max(LEAST_TOKENS, EXPERT_WORK_BYTES // of_a_token)
        count = max(slices[0].count for slices in layers)
        is_gpu = device.type == "cuda"
        self._used = torch.zeros(count, dtype=torch.uint8, device=device)
        self._used_here = torch.zeros(count, dtype=torch.uint8, pin_memory=is_gpu)
        self._looked = module.Event()
        self._multiply: Multiply = fused_experts if is_gpu else multiplied_one_by_one

    def __contains__(self, layer: int) -> bool:
        return layer in self._layers

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers, ascending."""
        return tuple(self._layers)

    @property
    def nbytes(self) -> int:
        """Bytes of the parts of all layers' experts in the host's memory."""
        return sum(
            half.begin(block.stop) - half.begin(block.start)
            for layer in self._layers.values()
            for block in [self.part.block(layer.count)]
            for half in layer.halves
        )

    def count(self, layer: int) -> int:
        """Experts of a layer."""
        return self._layers[layer].count

    def kernel_tokens(self, layer: int, chosen: int, least: int, most: int) -> list[int]:
        """Numbers of tokens whose steps use all forms of the kernel; none where it is not compiled.

        Args:
            layer: its number.
            chosen: experts of a token.
            least: tokens of a step.
            most: tokens of a step; a longer one is computed in chunks.

        """
        if self.device.type != "cuda":
            return []
        slices = self._layers[layer].slices
        (outputs, hidden), (_, inner) = (half.shape for half in slices[0].halves)
        ranks, experts = len(slices), min(self.experts, self.count(layer))
        shapes = (experts, ranks * outputs, hidden), (experts, hidden, ranks * inner)
        return kernel_tokens(*shapes, chosen, least, min(most, self._chunk))

    def begin(self, ids: torch.Tensor, layer: int, experts: int | None = None) -> None:
        """Order the weights that a layer's `sums` will read, before its tokens are known.

        Args:
            ids: as for `sums`.
            layer: its number.
            experts: as for `sums`.

        """
        asked = self._layers[layer]
        if not self._looks(ids, asked):
            if pieces := self._first_pieces(layer, experts):
                self._reader.expect(pieces[0])
            return
        used = self._used[: asked.count].zero_()
        used.scatter_(0, ids.clamp(min=0).flatten().long(), 1)
        self._used_here[: asked.count].copy_(used, non_blocking=True)
        self._looked.record(self._stream())

    def sums(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        layer: int,
        experts: int | None = None,
        others: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Sums [M, hidden] over the experts of each token that are computed here; behind `begin` of
        the same.

        Args:
            x: [M, hidden], bf16.
            weights: [M, chosen], float32.
            ids: [M, chosen]; a negative one is none, and adds nothing.
            layer: its number.
            experts: how many of the layer's experts all GPUs compute, each the first ones of its
                part; all unless given.
            others: gives sums [M, hidden] of the other ones, which are added; called once all
                products here are ordered.

        """
        linked = self._layers[layer]
        if self._looks(ids, linked):
            pieces = self._used_pieces(layer, experts)
        else:
            pieces = self._first_pieces(layer, experts)
        x, (weights, ids) = x.contiguous(), without_none(weights, ids)
        found = torch.empty_like(x)
        # One piece has all that a token wants; sums of several are rounded once.
        is_one = len(pieces) == 1 and others is None
        total = found if is_one else torch.zeros(x.shape, device=x.device)
        for piece in pieces:
            read = self._read(linked, piece)
            matrices = ExpertMatrices(*read, *self._expansion.biases_of(linked, piece.runs))
            for begin in range(0, len(x), self._chunk):
                rows = slice(begin, begin + self._chunk)
                part = self._multiply(
                    x[rows], matrices, weights[rows], ids[rows],
                    activation=linked.activation, count=linked.count, places=piece.places,
                )  # fmt: skip
                if is_one:
                    found[rows] = part
                else:
                    total[rows] += part
        if others is not None:
            total += others()
        return found if is_one else found.copy_(total)

    def _looks(self, ids: torch.Tensor, layer: LinkedLayer) -> bool:
        """Whether so few tokens are expected to leave experts out that are worth it."""
        tokens, chosen = ids.shape
        unused: float = (1 - chosen / layer.count) ** tokens
        return unused > UNUSED

    def _first_pieces(self, layer: int, experts: int | None) -> tuple[Piece, ...]:
        count = self.count(layer)
        if experts is None or experts >= count:
            # Whole layers follow each other, whatever the number of their experts.
            return self._pieces.first(layer, self._all)
        mine = len(self.part.first(experts, count))
        return self._pieces.first(layer, mine) if mine else ()

    def _used_pieces(self, layer: int, experts: int | None) -> tuple[Piece, ...]:
        self._looked.synchronize()
        count = self.count(layer)
        mine = self.part.first(count if experts is None else min(experts, count), count)
        used = self._used_here[mine.start : mine.stop].nonzero().flatten() + mine.start
        return self._pieces.of(layer, used.tolist())

    def _stream(self) -> Any:
        return self._module.current_stream()

    def _read(self, layer: LinkedLayer, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        """Gates and ups of a piece, and downs, in bf16."""
        slot = self._reader.next(piece, self._stream())
        found = self._expansion.expanded(layer, slot.memory, piece.runs)
        self._reader.give_back(slot, self._stream())
        return found


def without_none(weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [M, chosen], float32, and ids that a kernel takes: no expert becomes expert 0 with a
    weight of 0.

    Args:
        weights: [M, chosen].
        ids: [M, chosen]; a negative one is none.

    """
    is_none = ids < 0
    return weights.float().masked_fill(is_none, 0), ids.masked_fill(is_none, 0)

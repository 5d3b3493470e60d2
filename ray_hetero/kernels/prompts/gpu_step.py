"""One step of whole decoder layers on a GPU, ordered by a thread of its own (gpu_layers.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ray_hetero.kernels.prompts import gpu_post_attention
from ray_hetero.kernels.prompts.gpu_attention import Attended, Lengths, attend, put_together
from ray_hetero.kernels.prompts.gpu_rotation import rotate
from ray_hetero.kernels.prompts.gpu_rows import chunks
from ray_hetero.kernels.prompts.kv_transfer import Span, spans_of
from ray_hetero.kernels.prompts.link_reader import current

if TYPE_CHECKING:
    from ray_hetero.kernels.layers.attention import Attention
    from ray_hetero.kernels.layers.kv_layouts import Caches
    from ray_hetero.kernels.layers.step_rows import StepRows
    from ray_hetero.kernels.prompts.gpu_layers import GpuLayers
    from ray_hetero.kernels.prompts.stage_output import StageOutput


class GpuStep:
    """One step's work on the GPU.

    Args:
        layers: what is computed, and with what.
        rows: of the step that are computed here.
        positions: [rows], int64.
        caches: whose keys and values are read, and which new ones are sent down for; None where
            there are none.

    """

    def __init__(
        self, layers: GpuLayers, rows: StepRows, positions: torch.Tensor, caches: Caches | None
    ) -> None:
        self._layers = layers.layers
        self._gpu = layers.gpu
        self._memory = layers.memory
        self._into = layers.into
        self._rows = rows
        self._positions = positions
        self._caches = caches
        self._turning: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def compute(
        self, staged: tuple[torch.Tensor, torch.Tensor | None], tokens: int,
        output: StageOutput | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Compute all layers.

        Args:
            staged: input, from `StepMemory.stage`.
            tokens: of the step, of which some rows are computed here.
            output: where results stay on the GPU.

        Returns:
            Results in host memory, or on their way to `output`.

        """
        gpu = self._gpu
        with torch.inference_mode(), current(gpu.computing):
            # What this thread waits for comes first: the rest is ordered ahead of the GPU.
            self._own = Lengths.of([one.tokens for one in self._rows.requests], gpu.device)
            self._angles(self._layers[0].attention.cos_sin)
            self._spans = self._begin_uploads()
            y, total = gpu.memory.sent(*staged)
            count = len(self._positions)
            if output is not None and not output.has_turn(count):
                gpu.read_first()
        if output is not None:
            output.wait_for_turn(count)
        with torch.inference_mode(), current(gpu.computing):
            for layer in self._layers:
                x = gpu_post_attention.add_and_norm(gpu, y, total, layer.input.norm)
                attended = self._attend(layer.attention, gpu.product(x, layer.input.qkv))
                y = gpu_post_attention.behind(gpu, layer.parts, attended, total)
            assert y is not None
            if output is None:
                y, total = gpu.received(y, total, into=self._into)
            else:
                output.put(tokens, self._rows.rows, y, total)
        return y, total

    def _begin_uploads(self) -> list[Span]:
        if self._caches is None:
            return []
        block, uploads = self._caches.caches[0].shape[2], self._memory.uploads
        spans = spans_of(
            self._rows.requests, self._caches.slots, block, uploads.most_blocks(block),
            self._gpu.device,
        )  # fmt: skip
        uploads.begin(self._caches.by_layer, spans)
        return spans

    def _attend(self, attention: Attention, qkv: torch.Tensor) -> torch.Tensor:
        """Attention of a layer: [tokens, queries] of [tokens, queries + keys + values]."""
        shape, tokens = self._memory.shape, len(qkv)
        heads = qkv.view(tokens, -1, shape.size)
        self._turn(attention, heads[:, : shape.heads + shape.kv_heads])
        queries = heads[:, : shape.heads]
        new = heads[:, shape.heads :].view(tokens, 2, shape.kv_heads, shape.size)
        if self._caches is not None:
            self._memory.returns.send(qkv[:, shape.queries :])
        assert attention.scores is not None
        scale = attention.scores.scale
        whole = attend(queries, new[:, 0], new[:, 1], self._own, self._own, scale, is_causal=True)
        for span in self._spans:
            put_together(
                whole, self._to_cached(span, queries, new, scale), span.query_rows,
                uses_triton=self._gpu.uses_triton,
            )  # fmt: skip
        return whole.values.reshape(tokens, shape.queries)

    def _to_cached(
        self, span: Span, queries: torch.Tensor, new: torch.Tensor, scale: float
    ) -> Attended:
        assert self._caches is not None
        keys, values = self._memory.uploads.next(span, self._caches.isa, new)
        return attend(
            queries if span.query_rows is None else queries[span.query_rows],
            keys, values, span.query_lengths, span.key_lengths, scale, is_causal=False,
        )  # fmt: skip

    def _turn(self, attention: Attention, heads: torch.Tensor) -> None:
        """Normalise and rotate queries and keys [tokens, heads, size], in place."""
        queries = self._memory.shape.heads
        parts = (heads[:, :queries], heads[:, queries:])
        for norm, part in zip(attention.norms, parts, strict=False):
            for rows in chunks(len(heads)):
                part[rows] = gpu_post_attention.norm(self._gpu, part[rows], norm)
        cos, sin = self._angles(attention.cos_sin)
        rotate(heads, cos, sin, uses_triton=self._gpu.uses_triton)

    def _angles(self, cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, 1, rotated / 2] of this step, float32; layers have them in common."""
        at = cos_sin.data_ptr()
        if at not in self._turning:
            self._turning[at] = self._memory.angles(cos_sin, self._positions)
        return self._turning[at]

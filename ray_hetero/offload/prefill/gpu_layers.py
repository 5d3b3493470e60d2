"""Whole decoder layers of a CPU rank on a GPU, in steps of many tokens.

The hidden state crosses the link once each way; in between the weights of each layer come piece by
piece (offload_gpu.py), and what attention needs comes and goes with them (kv_transfer.py).  One
thread of this process orders the GPU's work.  The main thread decodes meanwhile what is left of the
step, and writes keys and values into the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from placement.units import GIB
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.layers.kv_layouts import Caches
from ray_hetero.kernels.layers.layer_parts import AttentionShape
from ray_hetero.kernels.layers.step_rows import StepRows
from ray_hetero.offload.prefill import layer_ops
from ray_hetero.offload.prefill.gpu_attention import (
    MOST_HEAD_SIZE,
    Attended,
    GpuAngles,
    Lengths,
    attend,
    put_together,
    rotate,
)
from ray_hetero.offload.prefill.kv_transfer import KvReturns, KvUploads, Span, spans_of
from ray_hetero.offload.prefill.layer_ops import chunks
from ray_hetero.offload.prefill.offload_gpu import OffloadGpu
from ray_hetero.offload.prefill.submission import LIMIT_S
from ray_hetero.offload.weights.link_reader import current
from ray_hetero.planning.prefill_memory import attention_bytes

if TYPE_CHECKING:
    from ray_hetero.kernels.layers.attention import Attention
    from ray_hetero.kernels.layers.kv_layouts import Caches
    from ray_hetero.kernels.layers.layer import Layer
    from ray_hetero.kernels.layers.step_rows import StepRows
    from ray_hetero.offload.prefill.stage_output import StageOutput


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
                x = layer_ops.add_and_norm(gpu, y, total, layer.input.norm)
                attended = self._attend(layer.attention, gpu.product(x, layer.input.qkv))
                y = layer_ops.behind(gpu, layer.parts, attended, total)
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
                part[rows] = layer_ops.norm(self._gpu, part[rows], norm)
        cos, sin = self._angles(attention.cos_sin)
        rotate(heads, cos, sin, uses_triton=self._gpu.uses_triton)

    def _angles(self, cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, 1, rotated / 2] of this step, float32; layers have them in common."""
        at = cos_sin.data_ptr()
        if at not in self._turning:
            self._turning[at] = self._memory.angles(cos_sin, self._positions)
        return self._turning[at]


class AttentionMemory:
    """Memory that layers with attentions of one shape share, on a GPU and beside it.

    Args:
        gpu: where layers are computed.
        shape: of every layer's attention.

    Raises:
        UnsupportedError: the GPU has too little memory left.

    """

    def __init__(self, gpu: OffloadGpu, shape: AttentionShape) -> None:
        self.shape = shape
        self.gpu_bytes = attention_bytes(shape.heads, shape.kv_heads, shape.size, gpu.tokens)
        try:
            self.returns = KvReturns(gpu, shape.kv_heads, shape.size)
            self.uploads = KvUploads(gpu, shape.kv_heads, shape.size)
            # Attention itself takes it from now on; torch keeps what was free for its stream.
            with current(gpu.computing):
                results = 2 * gpu.tokens * shape.queries
                torch.empty(results, dtype=torch.bfloat16, device=gpu.device)
        except RuntimeError as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise UnsupportedError(
                "the GPU computes this rank's linear layers in prompts, but not its attention, "
                f"which needs {self.gpu_bytes / GIB:.1f} GiB more of its memory: {reason}. Prompts "
                "of thousands of tokens take several times as long. Lower gpu.memory_utilization "
                "or --max-num-batched-tokens."
            ) from None
        self.angles = GpuAngles(gpu.memory, gpu.tokens)
        gpu.idle += [*self.returns.idle, *self.uploads.idle]


class GpuLayers:
    """Computes layers that follow one another.

    Args:
        layers: at least one, each with a known scale and the memory's shape of attention.
        gpu: has their weights.
        memory: for attention.
        into: page-locked memory for both results, [2, most tokens · N], bf16; None for new memory
            each time.

    """

    instead = (
        "it computes their linear layers only, and prompts of thousands of tokens take several "
        "times as long"
    )
    """Consequence of the GPU's running out of memory, for messages."""
    others: tuple[tuple[torch.Tensor, ...], ...] = ()
    """Caches of the other ranks, as in `Caches.others`."""

    def __init__(
        self, layers: Sequence[Layer], gpu: OffloadGpu, memory: AttentionMemory,
        into: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.layers, self.gpu, self.memory, self.into = layers, gpu, memory, into
        self._writing: Iterator[None] = iter(())
        """Writes of the layers of a step into the cache, one after the other."""
        self.is_written = True
        """Whether all keys and values of the last step are in the cache."""

    def reaches(self, caches: Sequence[torch.Tensor]) -> bool:
        """Make ready to copy from layers' caches; whether they can be had."""
        self.memory.uploads.lock(caches)
        return True

    def __call__(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        rows: StepRows,
        caches: Caches | None,
        meanwhile: Callable[[], None],
        output: StageOutput | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layers for some rows of a step, as `LayersOnGpu` says.

        With an output, what is returned is on its way there; where its message goes ahead, keys and
        values may be on theirs too until `finish`.
        """
        gpu = self.gpu
        gpu.begin(len(positions))
        staged = gpu.memory.stage(hidden, residual, rows.rows)
        step = GpuStep(self, rows, positions[rows.rows], caches)
        ordered = gpu.submit(lambda: step.compute(staged, len(positions), output))
        ordered.add_done_callback(lambda _: self.memory.returns.end())
        meanwhile()
        self._writing, self.is_written = self._writes(caches), False
        goes_ahead = output is not None and output.goes_ahead(rows.tokens)
        for _ in self._writing:
            if goes_ahead and ordered.done() and ordered.exception() is None:
                break
        else:
            self.is_written = True
        x, total = ordered.result(timeout=LIMIT_S)
        return x, total

    def finish(self) -> None:
        """Write what has not been written of keys and values of the last step."""
        for _ in self._writing:
            pass
        self.is_written = True

    def _writes(self, caches: Caches | None) -> Iterator[None]:
        """Write keys and values of each layer into the cache, as they come down."""
        returns, written = self.memory.returns, 0
        while (returned := returns.take()) is not None:
            assert caches is not None
            module, first = caches.modules[written], 0
            for cache in caches.by_layer[written]:
                heads = slice(first, first + cache.shape[1])
                module.impl.do_kv_cache_update(
                    module, returned.keys[:, heads], returned.values[:, heads], cache, caches.slots
                )
                first = heads.stop
            returns.give_back(returned)
            written += 1
            yield


def shape_of(layers: Sequence[Layer]) -> AttentionShape | None:
    """The shape of all layers' attentions, if it is one that can be computed here."""
    shapes = {layer.attention.shape for layer in layers}
    if len(shapes) > 1 or not all(layer.attention.is_plain for layer in layers):
        return None
    (shape,) = shapes
    return shape if shape.size <= MOST_HEAD_SIZE else None

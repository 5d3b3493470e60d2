"""The last columns of MLPs on a GPU, in decode steps whose other columns the cores compute.

A GPU reads its columns of a layer's gate and up over its link while the cores read theirs, and the
attention and the other matrices, from the socket's memory.  The cores write what the gate
multiplies where the GPU reads it, the GPU writes activated columns where the cores read them, and
words in the host's memory say when (column_channel.py).  All work of a step is ordered at its
beginning, on a stream that waits for these words, so that nothing is called between layers.

Where the GPU has all columns and the link is still idle, as in steps of many tokens, it computes
the last outputs of the MLPs from them too, of a rank that has no group.

In a tensor-parallel group the first rank has the GPU, which computes the last columns of every rank
from the first one's tokens; each rank has words and columns of its own, in memory that all map
(column_channel.py has the other ranks).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING

import torch

from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels import step_trace
from ray_hetero.kernels.formats.base import BLOCK
from ray_hetero.kernels.layers.layer_parts import CpuBlocks
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.kernels.step_trace import Event
from ray_hetero.log import logger
from ray_hetero.offload.decode.column_channel import (
    FAILED,
    OUT_OF_MEMORY,
    PHASE,
    PHASES,
    WORDS_BYTES,
    ColumnChannel,
    ColumnMemory,
)
from ray_hetero.offload.decode.column_pieces import (
    LayerSlices,
    StepSlices,
    are_alike,
    expanded_whole,
    first_block,
    inner_of,
    last_columns,
    last_outputs,
)
from ray_hetero.offload.decode.step_graphs import Expand, StepGraphs, StepKind
from ray_hetero.offload.prefill import layer_ops
from ray_hetero.offload.prefill.offload_gpu import OffloadGpu
from ray_hetero.offload.prefill.submission import LIMIT_S
from ray_hetero.offload.weights.link_reader import current
from ray_hetero.offload.weights.read_sequence import ReadSequence
from ray_hetero.offload.weights.resident_pieces import IdleMemory
from ray_hetero.offload.weights.weight_pieces import WeightSlice, WholeWeight
from ray_hetero.planning.prefill_memory import SHARED_TOKENS
from ray_hetero.runtime import gpu_memory
from ray_hetero.runtime.stream_words import words_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ray_hetero.kernels.layers.layer import Layer
    from ray_hetero.kernels.layers.layer_parts import PostAttention

TILE = 32
"""Inputs of a token that are neighbours where the cores multiply tiles."""
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, SHARED_TOKENS)
"""Numbers of tokens that the GPU's work is ordered for: a step has that of the least that suffices.
Requests come and end all the time, and the work of each number would have to be captured anew; what
the GPU computes more is much less than the weights that it reads for it."""


class MlpColumnOffload(ColumnChannel):
    """The last columns of the MLPs of layers that follow one another.

    Args:
        layers: that `suits`, with the weights of all ranks.
        gpu: has their weights, and memory for pieces of them.
        kernel: what computes this rank's other columns.
        ranks: memory of each rank of a group, page-locked, of which this is the first; none for a
            rank that has the layers alone.

    Raises:
        UnsupportedError: a stream of the GPU cannot wait for words.

    """

    def __init__(
        self, layers: Sequence[Layer], gpu: OffloadGpu, kernel: StreamingLinear,
        ranks: Sequence[ColumnMemory] = (),
    ) -> None:  # fmt: skip
        self._parts = [layer.parts for layer in layers]
        self._hidden = self._parts[0].norm.weight.shape[0]
        inner = inner_of(self._parts[0]) // (len(ranks) or 1)
        host = gpu.memory.host_memory
        self._ranks = list(ranks) or [
            ColumnMemory(host(WORDS_BYTES, dtype=torch.uint8).zero_(), host(SHARED_TOKENS * inner))
        ]
        inputs = host(SHARED_TOKENS * self._hidden)
        has_outputs = not ranks and all(one.down is None or one.down.adapters is None
                                        for one in self._parts)  # fmt: skip
        outputs = host(SHARED_TOKENS * self._hidden) if has_outputs else None
        super().__init__(len(layers), inner, kernel, self._ranks[0], inputs, outputs)
        self._gpu = gpu
        self._are_tiles = kernel.level.has_tiles
        self._seen_inputs = self._seen(inputs)
        self._seen_outputs = None if outputs is None else self._seen(outputs)
        self._seen_columns = [self._seen(rank.columns) for rank in self._ranks]
        self._link_rate = gpu.link_rate
        self._signals = words_of(gpu.device, gpu.computing, self._own.answered)
        self._pieces: dict[CpuBlocks, StepSlices] = {}
        """Pieces of a step, by the blocks that the cores compute."""
        self.graphs = StepGraphs(gpu)
        """Graphs of the steps that came again."""

    @property
    def tokens(self) -> int:
        """Most tokens of a step that is shared."""
        return min(SHARED_TOKENS, self._gpu.tokens)

    @property
    def about(self) -> str:
        """The GPU and what it has room for."""
        return self._gpu.about

    @contextmanager
    def of_step(self, tokens: int, kept: CpuBlocks) -> Iterator[None]:
        """Submit the GPU's part of a step; the cores compute theirs within this context."""
        kind = StepKind(self._size(tokens), kept, self.begin())
        self.native.room = kind.tokens
        ordered = self._submitted(kind)
        try:
            yield
        finally:
            self._end(ordered, kind.first)

    def fetch(self, tokens: int, kept: CpuBlocks, *, is_ahead: bool = False) -> float:
        """Prefetch a step's pieces to the places where they stay, if a larger step evicted them.

        Not before there is a graph of such steps, which says where they stay; and not where decode
        steps of another kind have had their place, as those of other layers have in every step.
        """
        kind = StepKind(self._size(tokens), kept, self.first)
        if not self.graphs.has(kind):
            return 0.0
        step = self._pieces_of(kept)
        if not self._gpu.reader.kept.is_of(step.order):
            return 0.0
        failing = self._gpu.leaving_shortage() if is_ahead else self._telling()
        with failing, torch.inference_mode(), current(self._gpu.computing):
            self._gpu.settle()
            self._keep(step)
            return self.graphs.fetch(kind) / self._link_rate
        return math.inf  # memory has run out

    def agreed(self, *, takes_part: bool) -> bool:
        """Decide, and tell the other ranks."""
        for rank in self._ranks[1:]:
            rank.say(takes_part=takes_part)
        return takes_part

    def _size(self, tokens: int) -> int:
        """Tokens that the GPU computes of a step."""
        return min(self.tokens, next(size for size in SIZES if size >= tokens))

    def _keep(self, step: StepSlices) -> None:
        self._gpu.reader.keep(step.order, step.pieces, partial(self._idle, step))

    def prepare(self, tokens: int, kept: CpuBlocks) -> None:
        """Capture graphs of all steps like the last one."""
        size = self._size(tokens)
        kinds = [StepKind(size, kept, phase * PHASE) for phase in range(PHASES)]
        self._gpu.submit(lambda: self._capture(kinds)).result(timeout=LIMIT_S)

    def _capture(self, kinds: Sequence[StepKind]) -> None:
        with torch.inference_mode(), current(self._gpu.computing):
            for kind in kinds:
                step = self._pieces_of(kind.kept)
                # Other steps wait for what this stream was given before, which nothing captures.
                if self._is_whole(step):
                    self.graphs.capture(kind, step.pieces, self._order_layers)

    def _submitted(self, kind: StepKind) -> Future[None]:
        """Submit the GPU's part of a step.

        An error of earlier work is that of the future too.  The cores then come to the first layer
        whose columns are missing, where the other ranks of a group end as well: ranks that ended
        before would leave the others in the sums of a layer.
        """
        try:
            with self._telling():
                self._gpu.settle()
        except (RuntimeError, TimeoutError) as error:
            failed: Future[None] = Future()
            failed.set_exception(error)
            return failed
        return self._gpu.submit(lambda: self._order(kind))

    def _end(self, ordered: Future[None], first: int) -> None:
        # The stream waits for all layers, which nobody asks for where a step has failed.
        self.end(first)
        ordered.result(timeout=LIMIT_S)

    def _order(self, kind: StepKind) -> None:
        with torch.inference_mode(), current(self._gpu.computing):
            with self._telling():
                step = self._pieces_of(kind.kept)
                self._keep(step)
                is_ordered = self.graphs.replay(kind)
                if not is_ordered:
                    self._order_layers(kind, partial(self._gpu.reader.expand_into, step.order))
            if not is_ordered and self._is_whole(step):
                self.graphs.note(kind, step.pieces, self._order_layers)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell all ranks if this fails."""
        why = FAILED
        try:
            yield
            why = 0
        except torch.OutOfMemoryError:
            why = OUT_OF_MEMORY
            # The ranks of a group are to come to the same layer, and compute the step again.
            self._gpu.wait()
            raise
        finally:
            if why:
                for rank in self._ranks:
                    ctypes.c_uint32.from_address(rank.failed).value = why

    def _order_layers(self, kind: StepKind, expand: Expand) -> None:
        gpu, step = self._gpu, self._pieces_of(kind.kept)
        is_whole = self._is_whole(step)
        for number, (parts, pieces) in enumerate(
            zip(self._parts, step.layers, strict=True), kind.first + 1
        ):
            columns = outputs = None
            if is_whole:
                columns = expanded_whole(gpu, pieces.columns, expand)
                if pieces.outputs:
                    outputs = expanded_whole(gpu, pieces.outputs, expand, pieces.column_values)
            step_trace.note(Event.WORD, "wait", "asked", number)
            self._signals.wait(self._own.asked, number)
            result = self._compute_columns(parts, pieces.columns, columns, kind)
            for rank in self._ranks:
                step_trace.note(Event.WORD, "write", "answered", number)
                self._signals.write(rank.answered, number)
            if pieces.outputs:
                self._compute_outputs(parts, pieces.outputs, outputs, result, kind.kept)
                step_trace.note(Event.WORD, "write", "projected", number)
                self._signals.write(self._own.projected, number)

    def _compute_columns(
        self, parts: PostAttention, pieces: Sequence[WeightSlice], whole: torch.Tensor | None,
        kind: StepKind,
    ) -> torch.Tensor:  # fmt: skip
        """Compute and send columns; [tokens, all ranks' columns], those that are not sent too."""
        gpu, tokens, kept = self._gpu, kind.tokens, kind.kept
        columns = self._inner - first_block(kept) * BLOCK
        assert parts.gate_up is not None
        halves = 2 if parts.is_gated else 1
        x = gpu.memory.to_multiply(tokens, self._hidden)
        given = self._seen_inputs[: tokens * self._hidden]
        if self._are_tiles:
            torch.mul(given.view(-1, tokens, TILE).transpose(0, 1), 1, out=x.view(tokens, -1, TILE))
        else:
            torch.mul(given.view(tokens, -1), 1, out=x)
        y = gpu.memory.products(tokens, halves * len(self._ranks) * columns)
        self._multiply(x, pieces, whole, self._added(parts, first_block(kept)), y, kept)
        result = layer_ops.activated(gpu, parts, y)
        sent = self._inner - kept.columns * BLOCK
        # A kernel's own stores cross the link at once; a copy would wait for weights on their way.
        for seen, own in zip(self._seen_columns, result.split(columns, dim=1), strict=True):
            torch.mul(own[:, columns - sent :], 1, out=seen[: tokens * sent].view(tokens, sent))
        return result

    def _compute_outputs(
        self, parts: PostAttention, pieces: Sequence[WeightSlice], whole: torch.Tensor | None,
        columns: torch.Tensor, kept: CpuBlocks,
    ) -> None:  # fmt: skip
        """Compute and send the last outputs of an MLP, of all of its columns [tokens, columns]."""
        assert parts.down is not None
        assert self._seen_outputs is not None
        tokens, outputs = len(columns), self._hidden - kept.outputs * BLOCK
        y = self._gpu.memory.products(tokens, outputs)
        bias = parts.down.bias
        added = None if bias is None else self._gpu.constant(bias)[kept.outputs * BLOCK :]
        self._multiply(columns, pieces, whole, added, y, kept)
        torch.mul(y, 1, out=self._seen_outputs[: tokens * outputs].view(tokens, outputs))

    def _multiply(
        self, x: torch.Tensor, pieces: Sequence[WeightSlice], whole: torch.Tensor | None,
        added: torch.Tensor | None, y: torch.Tensor, kept: CpuBlocks,
    ) -> None:  # fmt: skip
        products = (
            self._expanded(pieces, self._pieces_of(kept).order)
            if whole is None
            else [(slice(0, y.shape[1]), whole)]
        )
        for outputs, weight in products:
            if added is None:
                torch.mm(x, weight, out=y[:, outputs])
            else:
                torch.addmm(added[outputs], x, weight, out=y[:, outputs])

    def _idle(self, step: StepSlices) -> list[IdleMemory]:
        """Memory of larger steps, where some pieces of a step can stay."""
        gpu = self._gpu
        expanded = gpu.reader.idle() if self._is_whole(step) else []
        return [*gpu.memory.idle(step.most_values), *gpu.idle, *expanded]

    def _is_whole(self, step: StepSlices) -> bool:
        """Whether there is room for all of the GPU's pieces of a layer at once."""
        return step.most_values <= len(self._gpu.memory.behind_products)

    def _expanded(
        self, pieces: Sequence[WeightSlice], order: ReadSequence
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Outputs of pieces, each with its values [inputs, outputs] until the next one."""
        for placed in pieces:
            weight = self._gpu.reader.expanded(placed.piece, order)
            yield placed.outputs, weight.t()

    def _added(self, parts: PostAttention, first: int) -> torch.Tensor | None:
        """Biases of columns from a block on, of all ranks' gates and then of up."""
        assert parts.gate_up is not None
        if parts.gate_up.bias is None:
            return None
        whole = self._gpu.constant(parts.gate_up.bias).view(-1, self._inner)
        return whole[:, first * BLOCK :].reshape(-1)

    def _pieces_of(self, kept: CpuBlocks) -> StepSlices:
        """The GPU's pieces of a step."""
        if kept not in self._pieces:
            ranks = len(self._ranks)
            layers = [
                LayerSlices(
                    self._in_order(last_columns(parts, first_block(kept), self._inner, ranks)),
                    self._in_order(last_outputs(parts, kept.outputs)) if kept.outputs else (),
                )
                for parts in self._parts
            ]
            self._pieces[kept] = StepSlices(layers)
        return self._pieces[kept]

    def _in_order(self, part: WholeWeight) -> list[WeightSlice]:
        return sorted(self._gpu.pieces_of(part), key=lambda placed: placed.outputs.start)

    def _seen(self, memory: torch.Tensor) -> torch.Tensor:
        """Page-locked memory as the GPU reads and writes it."""
        if self._gpu.device.type != "cuda":
            return memory
        raw = gpu_memory.seen(memory.data_ptr(), memory.nbytes, self._gpu.device)
        return raw.view(torch.bfloat16)


def columns_of(
    layers: Sequence[Layer], gpu: OffloadGpu, kernel: StreamingLinear,
    ranks: Sequence[ColumnMemory] = (),
) -> MlpColumnOffload | None:  # fmt: skip
    """Offload of columns of the layers' MLPs.

    None where these are not alike, or too few, or where the GPU's streams cannot wait for words.

    Args:
        layers: those that `suits`, with the weights of all ranks.
        gpu: has their weights.
        kernel: what computes this rank's other columns.
        ranks: as of `MlpColumnOffload`.

    """
    if not are_alike(layers, len(ranks) or 1):
        return None
    try:
        return MlpColumnOffload(layers, gpu, kernel, ranks)
    except UnsupportedError as error:
        _say_once(f"the cores compute decode steps alone: {error}")
        return None


def maker_of(
    layers: Sequence[Layer], gpu: OffloadGpu, kernel: StreamingLinear,
    ranks: Sequence[ColumnMemory] = (),
) -> Callable[[int], MlpColumnOffload | None]:  # fmt: skip
    """Makes `columns_of` the first of some layers, by their number; arguments as there."""
    return lambda count: columns_of(layers[:count], gpu, kernel, ranks)


@cache
def _say_once(message: str) -> None:
    logger.warning("%s", message)

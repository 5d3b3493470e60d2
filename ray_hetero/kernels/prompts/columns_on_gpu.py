"""The last columns of MLPs on a GPU, in decode steps whose other columns the cores compute.

A GPU reads its columns of a layer's gate and up over its link while the cores read theirs, and the
attention and the other matrices, from the socket's memory.  The cores write what the gate
multiplies where the GPU reads it, the GPU writes activated columns where the cores read them, and
words in the host's memory say when (csrc/kernels/column_share.h).  All work of a step is ordered at
its beginning, on a stream that waits for these words, so that nothing is called between layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ray_hetero.kernels.formats.base import BLOCK
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.kernels.prompts import gpu_post_attention
from ray_hetero.kernels.prompts.gpu_prefill import LIMIT_S, GpuPrefill
from ray_hetero.kernels.prompts.link_reader import current
from ray_hetero.kernels.prompts.weight_pieces import Part, Placed, ReadingOrder, WholeWeight
from ray_hetero.planning.prefill_memory import SHARED_TOKENS
from ray_hetero.runtime import gpu_memory
from ray_hetero.runtime.stream_words import VALUES, words_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ray_hetero.kernels.layers.decoder_layers import Layer
    from ray_hetero.kernels.layers.layer_parts import PostAttention

LINE_BYTES = 64
"""Bytes of a cache line, at whose beginnings the words are."""
WAIT_S = 60.0
"""Longest wait of the cores for the columns of a layer, in seconds; they take milliseconds."""
TILE = 32
"""Inputs of a token that are neighbours where the cores multiply tiles."""


class ColumnsOnGpu:
    """The last columns of the MLPs of layers that follow one another.

    Args:
        layers: that `suits`; this rank has all of their weights.
        gpu: has their weights, and memory for pieces of them.
        kernel: what computes the other columns.

    Raises:
        UnsupportedError: a stream of the GPU cannot wait for words.

    """

    def __init__(self, layers: Sequence[Layer], gpu: GpuPrefill, kernel: StreamingLinear) -> None:
        self._parts = [layer.parts for layer in layers]
        self._gpu = gpu
        self._are_tiles = kernel.level.has_tiles
        hidden, inner = self._parts[0].norm.weight.shape[0], inner_of(self._parts[0])
        self._hidden, self._inner = hidden, inner
        self._words = gpu.memory.host_memory(3 * LINE_BYTES, dtype=torch.uint8).zero_()
        self._inputs = gpu.memory.host_memory(SHARED_TOKENS * hidden)
        self._columns = gpu.memory.host_memory(SHARED_TOKENS * inner)
        at = self._words.data_ptr()
        self._asked, self._answered, self._failed = (at + line * LINE_BYTES for line in range(3))
        self.native = kernel.native.ColumnShare(
            words=at, inputs=self._inputs.data_ptr(), columns=self._columns.data_ptr(),
            limit_s=WAIT_S,
        )  # fmt: skip
        """Memory by which the cores hand tokens over, and get columns."""
        self._seen_inputs, self._seen_columns = map(self._seen, (self._inputs, self._columns))
        self._signals = words_of(gpu.device, gpu.computing, self._answered)
        self._pieces: dict[int, list[list[Placed]]] = {}
        self._orders: dict[int, ReadingOrder] = {}

    @property
    def blocks(self) -> int:
        """Blocks of 32 columns of an MLP, of which the cores compute one at least, and not all."""
        return self._inner // BLOCK

    @contextmanager
    def of_step(self, tokens: int, kept: int) -> Iterator[None]:
        """Have the GPU compute its columns of a step that the cores compute within this.

        Args:
            tokens: of the step.
            kept: blocks of columns that the cores compute.

        Raises:
            torch.OutOfMemoryError: the GPU's memory has run out.
            RuntimeError: what else CUDA says.
            TimeoutError: ordering the GPU's work takes too long.

        """
        first = self.native.asked
        self._gpu.begin(is_shared=True)
        ordered = self._gpu.order(lambda: self._order(tokens, kept, first))
        try:
            yield
        finally:
            self._end(ordered, first)

    def _end(self, ordered: Future[None], first: int) -> None:
        # The stream waits for all layers, which nobody asks for where a step has failed.
        ctypes.c_uint32.from_address(self._asked).value = (first + len(self._parts)) % VALUES
        ordered.result(timeout=LIMIT_S)

    def _order(self, tokens: int, kept: int, first: int) -> None:
        is_done = False
        try:
            with torch.inference_mode(), current(self._gpu.computing):
                for number, (parts, pieces) in enumerate(
                    zip(self._parts, self._pieces_of(kept), strict=True), first + 1
                ):
                    whole = self._gpu.expanded_whole(pieces, self._orders[kept])
                    self._signals.wait(self._asked, number % VALUES)
                    self._compute(parts, pieces, whole, tokens, kept)
                    self._signals.write(self._answered, number % VALUES)
            is_done = True
        finally:
            if not is_done:
                ctypes.c_uint32.from_address(self._failed).value = 1

    def _compute(
        self, parts: PostAttention, pieces: Sequence[Placed], whole: torch.Tensor | None,
        tokens: int, kept: int,
    ) -> None:  # fmt: skip
        gpu, columns = self._gpu, self._inner - kept * BLOCK
        assert parts.gate_up is not None
        halves = 2 if parts.is_gated else 1
        x = gpu.memory.to_multiply(tokens, self._hidden)
        given = self._seen_inputs[: tokens * self._hidden]
        if self._are_tiles:
            torch.mul(given.view(-1, tokens, TILE).transpose(0, 1), 1, out=x.view(tokens, -1, TILE))
        else:
            torch.mul(given.view(tokens, -1), 1, out=x)
        y = gpu.memory.products(tokens, halves * columns)
        added = self._added(parts, kept)
        products = (
            gpu.expanded(pieces, self._orders[kept])
            if whole is None
            else [(slice(0, halves * columns), whole)]
        )
        for outputs, weight in products:
            if added is None:
                torch.mm(x, weight, out=y[:, outputs])
            else:
                torch.addmm(added[outputs], x, weight, out=y[:, outputs])
        result = gpu_post_attention.activated(gpu, parts, y)
        # A kernel's own stores cross the link at once; a copy would wait for weights on their way.
        into = self._seen_columns[: tokens * columns].view(tokens, columns)
        torch.mul(result, 1, out=into)

    def _added(self, parts: PostAttention, kept: int) -> torch.Tensor | None:
        """Biases of the GPU's columns, of the gate and of up."""
        assert parts.gate_up is not None
        if parts.gate_up.bias is None:
            return None
        whole = self._gpu.constant(parts.gate_up.bias).view(-1, self._inner)
        return whole[:, kept * BLOCK :].reshape(-1)

    def _pieces_of(self, kept: int) -> list[list[Placed]]:
        """The GPU's pieces of each layer, in their order."""
        if kept not in self._pieces:
            self._orders[kept] = ReadingOrder()
            self._pieces[kept] = [
                self._gpu.pieces_of(self._last_columns(parts, kept)) for parts in self._parts
            ]
        return self._pieces[kept]

    def _last_columns(self, parts: PostAttention, kept: int) -> WholeWeight:
        assert parts.gate_up is not None
        weight, columns = parts.gate_up.weight, self._inner - kept * BLOCK
        runs = tuple(
            (end - columns, end, number * columns)
            for number, end in enumerate(range(self._inner, weight.shape[0] + 1, self._inner))
        )
        return WholeWeight((Part(weight, runs),), (len(runs) * columns, weight.shape[1]))

    def _seen(self, memory: torch.Tensor) -> torch.Tensor:
        """Page-locked memory as the GPU reads and writes it."""
        if self._gpu.device.type != "cuda":
            return memory
        raw = gpu_memory.seen(memory.data_ptr(), memory.nbytes, self._gpu.device)
        return raw.view(torch.bfloat16)


def inner_of(parts: PostAttention) -> int:
    """Columns of an MLP: inputs of its last matrix."""
    assert parts.down is not None
    return parts.down.weight.shape[1]

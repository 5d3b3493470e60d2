"""Keys and values on their way between a CPU rank's cache and the GPU that computes its prompts.

Those of new tokens come down layer by layer while later layers are computed, and are written into
the paged cache, where decoding needs them.  Those of cached tokens (earlier chunks of a prompt, a
prefix that others have computed) go up block by block as they lie in the cache, ahead of their use.
"""

from __future__ import annotations

import itertools
import math
import queue
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.layers.kv_layouts import TILES, unpack_blocks
from ray_hetero.kernels.layers.step_rows import Request
from ray_hetero.log import logger
from ray_hetero.offload.expand.triton_runtime import kernels
from ray_hetero.offload.prefill.gpu_attention import Lengths
from ray_hetero.offload.prefill.offload_gpu import OffloadGpu
from ray_hetero.offload.weights.link_reader import Slot, current
from ray_hetero.offload.weights.resident_pieces import IdleMemory
from ray_hetero.planning import prefill_memory
from ray_hetero.planning.prefill_memory import BF16_BYTES, KV_RETURNS, KV_SLOTS
from ray_hetero.runtime.gpu_memory import lock_pages

TOKENS = 32
"""Tokens that a program of the kernel writes."""


def unpack(blocks: torch.Tensor, isa: str, into: torch.Tensor, *, uses_triton: bool) -> None:
    """Write keys and values of blocks token by token, as `unpack_blocks` does.

    Args:
        blocks: [blocks, kv heads, tokens of a block, 2 · size], bf16, contiguous.
        isa: their layout.
        into: [2, blocks · tokens of a block, kv heads, size]; elements of a head are neighbours.
        uses_triton: whether one kernel does it, where two operators copy elements in the order in
            which they are written, which takes several times as long.

    """
    if not uses_triton:
        unpack_blocks(blocks, isa, into)
        return
    count, heads, block, both = blocks.shape
    size = both // 2
    assert blocks.is_contiguous()
    assert into.stride(3) == 1
    parts = -(-block // TOKENS)
    kernels().unpack[(count, heads, 2 * parts)](
        blocks, into, *into.stride()[:3], block, size, parts,
        isa == TILES, TOKENS, 1 << (size - 1).bit_length(),
    )  # fmt: skip


HOST_BUFFERS = 8
"""Layers whose new keys and values may wait in host memory to be written into the cache."""
LIMIT_S = 300.0
"""Longest wait for one layer."""


@dataclass(frozen=True)
class Returned:
    """New keys and values of a layer, in host memory once `ready` has come."""

    buffer: torch.Tensor
    """Host memory that holds the keys and values."""
    keys: torch.Tensor
    """[tokens, kv heads, size]."""
    values: torch.Tensor
    ready: Any


class KvReturns:
    """New keys and values of one layer after the other on their way down.

    One thread sends them, another takes them in the same order.

    Args:
        gpu: where they come from.
        kv_heads: of keys, and of values.
        size: of a head.

    """

    def __init__(self, gpu: OffloadGpu, kv_heads: int, size: int) -> None:
        self._gpu = gpu
        self._shape = (2, kv_heads, size)
        elements = gpu.tokens * 2 * kv_heads * size
        there = [
            (torch.empty(elements, dtype=torch.bfloat16, device=gpu.device), gpu.event())
            for _ in range(KV_RETURNS)
        ]
        self._there = itertools.cycle(there)
        row = 2 * kv_heads * size * BF16_BYTES
        self.idle = [
            IdleMemory(memory.view(torch.uint8), gone, row_bytes=row) for memory, gone in there
        ]
        """Memory that decode steps leave idle."""
        self._stream = gpu.stream()
        self._computed = gpu.event()
        self._free: queue.SimpleQueue[tuple[torch.Tensor, Any]] = queue.SimpleQueue()
        for _ in range(HOST_BUFFERS):
            self._free.put((gpu.memory.host_memory(elements), gpu.event()))
        self._sent: queue.SimpleQueue[Returned | None] = queue.SimpleQueue()

    def send(self, keys_and_values: torch.Tensor) -> None:
        """Send a layer's.

        Args:
            keys_and_values: [tokens, 2 · kv heads · size] on the GPU; may be overwritten by what is
                computed after this.

        """
        there, gone = next(self._there)
        buffer, ready = self._wait(self._free, "the cores to write keys and values into the cache")
        shape = (len(keys_and_values), *self._shape)
        there, here = (x[: keys_and_values.numel()].view(shape) for x in (there, buffer))
        self._gpu.computing.wait_event(gone)
        there.copy_(keys_and_values.reshape(shape))
        self._computed.record(self._gpu.computing)
        with current(self._stream):
            self._stream.wait_event(self._computed)
            here.copy_(there, non_blocking=True)
            gone.record(self._stream)
            ready.record(self._stream)
        self._sent.put(Returned(buffer, here[:, 0], here[:, 1], ready))

    def end(self) -> None:
        """Let `take` know that no more come."""
        self._sent.put(None)

    def take(self) -> Returned | None:
        """Wait for the next layer's; None if none come any more."""
        found: Returned | None = self._wait(
            self._sent, "the GPU to compute keys and values of a prompt"
        )
        if found is not None:
            found.ready.synchronize()
        return found

    def give_back(self, returned: Returned) -> None:
        """Let the memory be used again."""
        self._free.put((returned.buffer, returned.ready))

    def _wait(self, waiting: queue.SimpleQueue[Any], what: str) -> Any:
        try:
            return waiting.get(timeout=LIMIT_S)
        except queue.Empty:
            raise TimeoutError(
                f"waited {LIMIT_S:g} s for {what}; look at the log of this rank, and at the GPU "
                "with nvidia-smi"
            ) from None


@dataclass(frozen=True)
class Span:
    """Cached tokens of one or more requests that attention reads at once; for every layer."""

    runs: tuple[tuple[int, int], ...]
    """Blocks of the cache that lie one after the other: first, number."""
    blocks: int
    tokens: int
    rows: torch.Tensor | None
    """Rows of the span's tokens among its blocks', on the GPU; None if they are the first ones."""
    news: tuple[torch.Tensor, torch.Tensor] | None
    """Rows of the span whose tokens are of this step, and their rows in it, on the GPU; or None."""
    key_lengths: Lengths
    query_lengths: Lengths
    query_rows: torch.Tensor | None
    """Tokens of the step that attend to them; None if it is all.  On the GPU."""


@dataclass
class _Part:
    """Some blocks of a request."""

    request: Request
    first: int
    blocks: int

    def tokens(self, block: int) -> int:
        return min(self.request.cached - self.first * block, self.blocks * block)


def spans_of(
    requests: Sequence[Request], slots: torch.Tensor, block: int, most_blocks: int,
    device: torch.device,
) -> list[Span]:  # fmt: skip
    """Divide the cached tokens of a step.

    Args:
        requests: of the step.
        slots: [tokens], where the step's own tokens go in the cache.
        block: tokens of a block.
        most_blocks: of a span.
        device: where it is attended.

    """
    groups: list[list[_Part]] = []
    room = 0
    for request in requests:
        first, all_blocks = 0, len(request.blocks)
        while first < all_blocks:
            if not room:
                groups.append([])
                room = most_blocks
            part = _Part(request, first, min(room, all_blocks - first))
            groups[-1].append(part)
            first, room = first + part.blocks, room - part.blocks
    if not groups:
        return []
    own = torch.sort(slots)
    return [_span(parts, requests, own, block, device) for parts in groups]


def _span(
    parts: list[_Part], requests: Sequence[Request], own: Any, block: int, device: torch.device
) -> Span:
    ids = torch.tensor([b for p in parts for b in p.request.blocks[p.first : p.first + p.blocks]])
    lengths = [part.tokens(block) for part in parts]
    begins = itertools.accumulate((part.blocks * block for part in parts), initial=0)
    rows = torch.cat([torch.arange(begin, begin + length)
                      for begin, length in zip(begins, lengths, strict=False)])  # fmt: skip
    # vLLM gives a prefix to a request as soon as another one of the same step is to compute it.
    places = ids[rows // block] * block + rows % block
    found = torch.searchsorted(own.values, places).clamp_(max=len(own.values) - 1)
    is_new = own.values[found] == places
    news = None
    if bool(is_new.any()):
        news = is_new.nonzero().flatten().to(device), own.indices[found[is_new]].to(device)
    queries = [part.request for part in parts]
    query_rows = None
    if queries != list(requests):
        query_rows = torch.cat([torch.arange(q.begin, q.begin + q.tokens) for q in queries])
    is_first = int(rows[-1]) == len(rows) - 1
    return Span(
        tuple(_runs(ids.tolist())), len(ids), len(rows), None if is_first else rows.to(device),
        news, Lengths.of(lengths, device), Lengths.of([q.tokens for q in queries], device),
        None if query_rows is None else query_rows.to(device),
    )  # fmt: skip


def _runs(blocks: list[int]) -> Iterator[tuple[int, int]]:
    first = before = blocks[0]
    for block in blocks[1:]:
        if block != before + 1:
            yield first, before + 1 - first
            first = block
        before = block
    yield first, before + 1 - first


class KvUploads:
    """Cached keys and values on their way up, span by span and ahead of their use.

    Args:
        gpu: where they go.
        kv_heads: of keys, and of values.
        size: of a head.

    """

    def __init__(self, gpu: OffloadGpu, kv_heads: int, size: int) -> None:
        self._gpu = gpu
        self._token = 2 * kv_heads * size
        self._stream = gpu.stream()
        elements = prefill_memory.KV_SPAN_BYTES // BF16_BYTES

        def memory() -> torch.Tensor:
            return torch.empty(elements, dtype=torch.bfloat16, device=gpu.device)

        self._elements = elements
        slots: list[Slot[Span]] = [
            Slot(memory(), gpu.event(), gpu.event()) for _ in range(KV_SLOTS)
        ]
        self._slots = itertools.cycle(slots)
        self._unpacked = memory()
        self.idle = [
            IdleMemory(self._unpacked.view(torch.uint8)),
            *(IdleMemory(one.memory.view(torch.uint8), one.ready, one.free) for one in slots),
        ]
        """Memory that decode steps leave idle."""
        self._locked: set[int] = set()
        self._wanted: Iterator[tuple[Sequence[torch.Tensor], Span]] = iter(())
        self._ahead: deque[tuple[Slot[Span], torch.Tensor]] = deque()

    def most_blocks(self, block: int) -> int:
        """Blocks of a span.

        Raises:
            UnsupportedError: not even one fits.

        """
        most = self._elements // (block * self._token)
        if not most:
            raise UnsupportedError(
                f"a block of {block} tokens has {block * self._token * BF16_BYTES >> 20} MiB of "
                f"keys and values in a layer, more than the {self._elements >> 19} MiB that the "
                "GPU has room for. Set a smaller --block-size."
            )
        return most

    def lock(self, caches: Sequence[torch.Tensor]) -> None:
        """Lock the pages of layers' caches, as far as that was not done and can be."""
        if self._gpu.device.type != "cuda":
            return
        for cache in caches:
            storage = cache.untyped_storage()
            if storage.data_ptr() in self._locked:
                continue
            self._locked.add(storage.data_ptr())
            try:
                lock_pages(torch.empty(0, dtype=torch.uint8).set_(storage))
            except RuntimeError as error:
                logger.warning(
                    "the KV cache cannot be locked for the GPU (%s): later chunks of prompts and "
                    "prefix-cache hits are copied to it about five times slower",
                    str(error).splitlines()[0],
                )

    def begin(self, caches: Sequence[Sequence[torch.Tensor]], spans: Sequence[Span]) -> None:
        """Begin a step: the spans of the first layer, of the second one, and so on.

        Args:
            caches: of each layer, one for each rank that has some of the heads, alike in shape.
            spans: of a layer.

        """
        self._wanted = itertools.product(caches, spans)
        self._ahead.clear()
        for _ in range(KV_SLOTS):
            self._fetch()

    def _fetch(self) -> None:
        wanted = next(self._wanted, None)
        if wanted is None:
            return
        caches, span = wanted
        slot = next(self._slots)
        shape = (len(caches), span.blocks, *caches[0].shape[1:])
        blocks = slot.memory[: math.prod(shape)].view(shape)
        with current(self._stream):
            self._stream.wait_event(slot.free)
            for own, cache in zip(blocks, caches, strict=True):
                at = 0
                for first, count in span.runs:
                    own[at : at + count].copy_(cache[first : first + count], non_blocking=True)
                    at += count
            slot.ready.record(self._stream)
        self._ahead.append((slot, blocks))

    def next(self, span: Span, isa: str, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the next span, [tokens, kv heads, size] each, until the one after.

        Args:
            span: of the layer that is computed.
            isa: layout of the cache.
            new: [tokens of the step, 2, kv heads, size], the layer's new keys and values.

        """
        slot, blocks = self._ahead.popleft()
        self._gpu.computing.wait_event(slot.ready)
        ranks, count, heads, block, both = blocks.shape
        shape = (2, count * block, ranks * heads, both // 2)
        unpacked = self._unpacked[: blocks.numel()].view(shape)
        for own, into in zip(blocks, unpacked.split(heads, dim=2), strict=True):
            unpack(own, isa, into, uses_triton=self._gpu.uses_triton)
        slot.free.record(self._gpu.computing)
        self._fetch()
        keys, values = unpacked
        if span.rows is None:
            keys, values = keys[: span.tokens], values[: span.tokens]
        else:
            keys, values = keys[span.rows], values[span.rows]
        if span.news is not None:
            into, where = span.news
            keys[into], values[into] = new[where, 0], new[where, 1]
        return keys, values

"""A decode step of decoder layers in one native call, attention included.

vLLM's operators for the attention of one layer, called from Python, take several times as long as
there is to compute while conversations are short; and threads are called together for each anew.
Requests may have a few tokens each, which verify drafts (`token_rows`).  Steps that are something
else (step_route.py), and attentions that do more than this knows, are computed layer by layer
(decoder_layers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ray_hetero.kernels.layers import layer_tokens
from ray_hetero.kernels.layers.adapters import Adapters
from ray_hetero.kernels.layers.attention import SPAN, Attention
from ray_hetero.kernels.layers.kv_layouts import ROWS, TILES
from ray_hetero.kernels.layers.layer_parts import CacheAddress, CpuBlocks, QkvInput
from ray_hetero.kernels.layers.post_attention import PostAttentionBlock
from ray_hetero.kernels.layers.protocols import SharesDecode
from ray_hetero.kernels.layers.step_rows import StepRows
from ray_hetero.kernels.linear.rank_sums import meeting
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.kernels.step_route import Reason
from ray_hetero.log import logger

Context = tuple[Any, Any, torch.Tensor, torch.Tensor]
"""Metadata of a step, vLLM's attention, its cache, and where its keys and values go."""


@dataclass(frozen=True)
class StepRequests:
    """Requests of one token each, of which several may be one of vLLM's."""

    positions: torch.Tensor
    """[requests], int64; as the others."""
    slots: torch.Tensor
    lengths: torch.Tensor
    """[requests], int32."""
    blocks: torch.Tensor
    """[requests, most blocks], int32."""

    def native(self, module: ModuleType, cache: torch.Tensor, isa: str | None) -> Any:
        """The native module's object, which points at these.

        Args:
            module: the native module.
            cache: of a layer, see `is_known`; or of latents, [blocks, tokens of a block, …].
            isa: how keys and values lie in its blocks; None for latents.

        """
        return module.Requests(
            m=len(self.positions),
            positions=self.positions.data_ptr(),
            slots=self.slots.data_ptr(),
            lengths=self.lengths.data_ptr(),
            blocks=self.blocks.data_ptr(),
            most_blocks=self.blocks.stride(0),
            block=cache.shape[1 if isa is None else 2],
            cache_blocks=cache.shape[0],
            tiles=isa == TILES,
            are_latents=isa is None,
        )


@dataclass(frozen=True)
class NativeStep:
    """A decode step of one layer that is an operator of its own (kinds.py)."""

    arguments: dict[str, Any]
    """Arguments of the native object's `run` that say where the step's requests are."""
    kept: object
    """Owner of the memory that the arguments point at."""


IsNative = Callable[[int], bool]
"""Whether a step's route is a native call, by most tokens of one of its requests."""
StepOf = Callable[[torch.Tensor, int, IsNative], NativeStep | Reason | None]
"""Function that describes the running step, from positions [M] and the number of tokens.  None if
it is no decode step; the reason if it is, and its metadata or the layer's cache are not known."""


def address_of(cache: torch.Tensor, number: int = 0) -> CacheAddress:
    """The address of a layer's cache, see `is_known`, by the number of its requests."""
    return cache.data_ptr(), cache.stride(0), cache.stride(1), number


class GpuShare(NamedTuple):
    """Columns of MLPs that a GPU computes in a native call."""

    columns: Any
    """The native module's; None where the GPU computes none."""
    kept: CpuBlocks
    """Blocks that the cores compute then."""


NOTHING_SHARED = GpuShare(None, CpuBlocks(0))
"""Share of a step whose cores compute everything."""


class NativeLayers:
    """Decoder layers that follow one another in one native call.

    Args:
        kernel: what computes linear layers.
        first: how the first layer begins.
        layers: at least one, each with known scores.

    """

    def __init__(
        self, kernel: StreamingLinear, first: QkvInput,
        layers: Sequence[tuple[Attention, PostAttentionBlock]],
    ) -> None:  # fmt: skip
        self._kernel = kernel
        native = kernel.native
        self._layers = native.DecoderLayers(
            first=first.native,
            layers=[(attention.rotation, attention.scores.native(native), block.native)
                    for attention, block in layers if attention.scores is not None],
        )  # fmt: skip
        self._kept = first, layers
        """Parts that the native object points at."""

    def run(
        self, requests: Sequence[Any], caches: Sequence[CacheAddress], hidden: torch.Tensor,
        residual: torch.Tensor | None, y: torch.Tensor, total: torch.Tensor,
        slots: torch.Tensor | None = None, share: GpuShare = NOTHING_SHARED,
    ) -> None:  # fmt: skip
        """Compute a decode step.

        Args:
            requests: the native module's, once for each group of layers with KV blocks of its own.
            caches: of each layer.
            hidden: [M, N], bf16, contiguous.
            residual: [M, N], bf16, contiguous; None at the beginning of a model.
            y: for what is still to be added to the residual [M, N], contiguous.
            total: for the residual [M, N], contiguous.
            slots: of adapters, [M], if some token has one.
            share: computed by a GPU.

        """
        self._layers.run(
            requests=requests,
            caches=caches,
            hidden=hidden.data_ptr(),
            residual=0 if residual is None else residual.data_ptr(),
            y=y.data_ptr(),
            sum=total.data_ptr(),
            level=self._kernel.level,
            slots=0 if slots is None else slots.data_ptr(),
            share=share.columns,
            kept=share.kept.columns,
            kept_outputs=share.kept.outputs,
        )


class DecodeStep:
    """Computes steps of one token a request, or of a few.

    Args:
        first: how the first layer begins.
        layers: at least one, each with known scores.
        kernel: what computes linear layers.
        adapters: of one of the linear layers; all of a step have the same slots.

    """

    def __init__(
        self,
        first: QkvInput,
        layers: Sequence[tuple[Attention, PostAttentionBlock]],
        kernel: StreamingLinear,
        adapters: Adapters | None,
    ) -> None:
        self._kernel = kernel
        self._adapters = adapters
        self._layers = NativeLayers(kernel, first, layers)
        self.shared: SharesDecode | None = None
        """Steps in which a GPU computes a part of each layer; None where none does."""

    def __call__(
        self, contexts: Sequence[Context], positions: torch.Tensor, hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
        """Compute a step as `DecoderLayers` does; None if its attention is of another kind.

        Args:
            contexts: vLLM's forward context of each layer, of a step whose route is a native call.
            positions: [M], int64.
            hidden: [M, N], bf16.
            residual: [M, N], bf16; None at the beginning of a model.

        """
        tokens = len(positions)
        groups = _groups(contexts, tokens, self._kernel.dtype)
        if groups is None:
            return None
        requests = []
        for metadata, _, cache, slots in groups:
            lengths, blocks = token_rows(metadata, tokens, cache.shape[2])
            requests.append(StepRequests(positions, slots, lengths, blocks))
        slots = None if self._adapters is None else self._adapters.slots(tokens)
        shared = self.shared if slots is None else None  # adapters are not on the GPU
        layer_tokens.count(len(contexts), native=tokens)
        if shared is not None and not shared.has(tokens):
            shared = None
        return self.run(requests, groups, contexts, hidden, residual, slots, shared)

    def decode(
        self,
        rows: StepRows,
        contexts: Sequence[Context],
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the decoding requests of a step that has others too.

        Args:
            rows: of the step, with at most as many decoding as a step may have, and no adapters.
            contexts: vLLM's forward context of each layer, with known caches.
            positions: of all tokens; so are the others.
            hidden: [M, N], bf16.
            residual: [M, N], bf16; None at the beginning of a model.

        Returns:
            As a call, for the decoding rows.

        """
        metadata, _, _, slots = contexts[0]
        own = rows.decoding_rows
        requests = StepRequests(
            positions[own], slots[own], rows.decoding_lengths,
            metadata.block_table[rows.decoding],
        )  # fmt: skip
        return self.run(
            [requests], contexts[:1], contexts, hidden[own],
            None if residual is None else residual[own],
        )  # fmt: skip

    def run(
        self, requests: Sequence[StepRequests], groups: Sequence[Context],
        contexts: Sequence[Context], hidden: torch.Tensor, residual: torch.Tensor | None,
        slots: torch.Tensor | None = None, shared: SharesDecode | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Compute requests of one token each.

        Args:
            requests: for each group of layers with KV blocks of its own.
            groups: context of the first layer of each.
            contexts: vLLM's forward context of each layer.
            hidden: [M, N], bf16.
            residual: [M, N], bf16; None at the beginning of a model.
            slots: of adapters, [M], if some token has one.
            shared: computes a part of each layer on a GPU; None where none does.

        Returns:
            As a call.

        """
        hidden = hidden.contiguous()
        residual = None if residual is None else residual.contiguous()
        number = {id(metadata): place for place, (metadata, *_) in enumerate(groups)}
        of_step = [
            one.native(self._kernel.native, cache, module.isa)
            for one, (_, module, cache, _) in zip(requests, groups, strict=True)
        ]
        caches = [address_of(cache, number[id(metadata)]) for metadata, _, cache, _ in contexts]
        if shared is not None:
            try:
                return shared(of_step, caches, hidden, residual)
            except torch.OutOfMemoryError as error:
                logger.warning(
                    "the GPU that computes a part of this rank's decode steps has run out of "
                    "memory (%s): from now on the cores compute all. Lower "
                    "gpu.memory_utilization or --max-num-batched-tokens.",
                    str(error).splitlines()[0],
                )
                self.shared = None
        y, total = torch.empty_like(hidden), torch.empty_like(hidden)
        with meeting(self._kernel.sums):
            self._layers.run(of_step, caches, hidden, residual, y, total, slots)
        return y, total


def _groups(
    contexts: Sequence[Context], tokens: int, dtype: torch.dtype
) -> list[Context] | None:  # fmt: skip
    """The context of the first of each group of layers, whose metadata is one object.

    vLLM gives layers with a sliding window KV blocks of their own.  None if a step, or a layer's
    cache, is one that is not known here.

    Args:
        contexts: vLLM's forward context of each layer.
        tokens: of the step.
        dtype: of keys and values.

    """
    found: dict[int, Context] = {}
    for context in contexts:
        metadata, module, cache, slots = context
        first = found.get(id(metadata))
        if first is None:
            if (
                metadata is None
                or slots is None
                or not is_described(metadata, slots, tokens)
                or not is_known(cache, module.isa, dtype)
            ):
                return None
            found[id(metadata)] = context
        elif first[1].isa != module.isa or cache.stride() != first[2].stride():
            return None
    return list(found.values())


def token_rows(metadata: Any, tokens: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Length and blocks of each token, each as a request of its own.

    The native decode step computes one token a request.  A request that verifies drafts has 1 + k
    of them, which is 1 + k requests of ascending length over the same blocks: keys and values of
    all are written before any of them is attended with.

    Args:
        metadata: vLLM's CPUAttentionMetadata of the step, as `is_described` takes it.
        tokens: of the step.
        block: tokens of a block.

    Returns:
        [tokens], int32, with the token itself; and [tokens, blocks], int32.

    """
    lengths, blocks = metadata.seq_lens, metadata.block_table
    if metadata.max_query_len == 1:
        return lengths, blocks
    starts = metadata.query_start_loc
    request = torch.repeat_interleave(starts.diff(), output_size=tokens)
    behind = starts[1:][request] - torch.arange(1, tokens + 1)
    used = -(-metadata.max_seq_len // block)
    return (lengths[request] - behind).to(torch.int32), blocks[:, :used][request]


def is_described(metadata: Any, slots: torch.Tensor, tokens: int) -> bool:
    """Whether a step is described as vLLM's CPU backend describes it.

    Args:
        metadata: vLLM's.
        slots: places of keys and values in the cache.
        tokens: of the step, whose route is a native call (step_route.py).

    """
    lengths, blocks, starts = metadata.seq_lens, metadata.block_table, metadata.query_start_loc
    return (
        metadata.num_actual_tokens == tokens
        and len(lengths) == len(blocks) == len(starts) - 1
        and (metadata.max_query_len > 1 or tokens == len(lengths))
        and len(slots) >= tokens
        and metadata.causal
        and metadata.dynamic_causal is None
        and (lengths.dtype, blocks.dtype, slots.dtype) == (torch.int32, torch.int32, torch.int64)
        and lengths.stride(0) == blocks.stride(1) == slots.stride(0) == 1
    )


def is_known(cache: torch.Tensor, isa: str, dtype: torch.dtype = torch.bfloat16) -> bool:
    """[blocks, heads, tokens of a block, 2 · size], keys and values of a head neighbours."""
    return (
        isa in {TILES, ROWS}
        and cache.dtype == dtype
        and cache.ndim == 4
        and cache.shape[2] % SPAN == 0
        and cache.stride()[2:] == (cache.shape[3], 1)
    )

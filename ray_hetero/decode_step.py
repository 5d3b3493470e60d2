"""A decode step of decoder layers in one native call, attention included.

vLLM's operators for the attention of one layer, called from Python, take several times as long as
there is to compute while conversations are short; and threads are called together for each anew.
Steps that are something else (prompts, speculative tokens, many requests), and attentions that do
more than this knows, are computed layer by layer (decoder_layers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.v1.attention.backend import AttentionType

from ray_hetero.between_attentions import Beginning, BetweenAttentions
from ray_hetero.streaming_linear import StreamingLinear

if TYPE_CHECKING:
    from ray_hetero.decoder_layers import Attention

TILES, ROWS = "amx", "vec"
"""How vLLM's CPU backend lays keys and values out in a block (`_get_attn_isa`)."""
SPAN = 32
"""Of a head's size and a block's tokens: what csrc/kernels/attention.h takes at once."""


class DecodeStep:
    """Computes steps of one token a request.

    Args:
        beginning: of the first layer.
        layers: at least one, each with a known scale.
        kernel: what computes linear layers.

    """

    def __init__(
        self,
        beginning: Beginning,
        layers: Sequence[tuple[Attention, BetweenAttentions]],
        kernel: StreamingLinear,
    ) -> None:
        self._kernel = kernel
        self._names = [attention.name for attention, _ in layers]
        self._layers = kernel.native.DecoderLayers(
            first=beginning.native,
            layers=[(attention.rotation, attention.scale, between.native)
                    for attention, between in layers],
        )  # fmt: skip

    def __call__(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As `DecoderLayers`, or None if this step is something else.

        Args:
            positions: [M], int64.
            hidden: [M, N], bf16.
            residual: [M, N], bf16; None at the beginning of a model.

        """
        tokens = len(positions)
        if tokens > self._kernel.few_tokens:
            return None
        contexts = [get_attention_context(name) for name in self._names]
        metadata, first, cache, slots = contexts[0]
        if (
            metadata is None
            or slots is None
            or not _is_decode(metadata, slots, tokens)
            or not _is_known(cache, first.isa)
            or any(one is not metadata or other.stride() != cache.stride()
                   for one, _, other, _ in contexts)
        ):  # fmt: skip
            return None
        hidden = hidden.contiguous()
        residual = None if residual is None else residual.contiguous()
        y, total = torch.empty_like(hidden), torch.empty_like(hidden)
        self._layers.run(
            requests=self._requests(positions, slots, metadata, cache, first.isa),
            caches=[other.data_ptr() for _, _, other, _ in contexts],
            block_stride=cache.stride(0),
            head_stride=cache.stride(1),
            hidden=hidden.data_ptr(),
            residual=0 if residual is None else residual.data_ptr(),
            y=y.data_ptr(),
            sum=total.data_ptr(),
            level=self._kernel.level,
        )
        return y, total

    def _requests(
        self, positions: torch.Tensor, slots: torch.Tensor, metadata: Any, cache: torch.Tensor,
        isa: str,
    ) -> Any:  # fmt: skip
        return self._kernel.native.Requests(
            m=len(positions),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            lengths=metadata.seq_lens.data_ptr(),
            blocks=metadata.block_table.data_ptr(),
            most_blocks=metadata.block_table.stride(0),
            block=cache.shape[2],
            cache_blocks=cache.shape[0],
            tiles=isa == TILES,
        )


def known_scale(attention: Any) -> float | None:
    """Scale of an attention's scores; None if it does more than csrc/kernels/attention.h does."""
    impl = attention.impl
    is_known = (
        type(impl).__name__ == "CPUAttentionBackendImpl"
        and impl.attn_type == AttentionType.DECODER
        and impl.alibi_slopes is None
        and impl.sliding_window == -1
        and not impl.logits_soft_cap
        and impl.sinks is None
        and not impl.is_fp8_kv_cache
        and attention.head_size % SPAN == 0
    )
    return float(impl.scale) if is_known else None


def _is_decode(metadata: Any, slots: torch.Tensor, tokens: int) -> bool:
    """One token of each request, as vLLM's CPU backend describes it."""
    lengths, blocks = metadata.seq_lens, metadata.block_table
    return (
        metadata.max_query_len == 1
        and metadata.num_actual_tokens == tokens == len(lengths) == len(blocks)
        and len(slots) >= tokens
        and metadata.dynamic_causal is None
        and (lengths.dtype, blocks.dtype, slots.dtype) == (torch.int32, torch.int32, torch.int64)
        and lengths.stride(0) == blocks.stride(1) == slots.stride(0) == 1
    )


def _is_known(cache: torch.Tensor, isa: str) -> bool:
    """[blocks, heads, tokens of a block, 2 · size], keys and values of a head neighbours."""
    return (
        isa in {TILES, ROWS}
        and cache.dtype == torch.bfloat16
        and cache.ndim == 4
        and cache.shape[2] % SPAN == 0
        and cache.stride()[2:] == (cache.shape[3], 1)
    )

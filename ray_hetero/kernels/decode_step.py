"""A decode step of decoder layers in one native call, attention included.

vLLM's operators for the attention of one layer, called from Python, take several times as long as
there is to compute while conversations are short; and threads are called together for each anew.
Requests may have a few tokens each, which verify drafts (token_rows.py).  Steps that are something
else (prompts, many requests), and attentions that do more than this knows, are computed layer by
layer (decoder_layers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.attention.attention import get_attention_context

from ray_hetero.kernels.attention import SPAN, Attention
from ray_hetero.kernels.kv_layouts import ROWS, TILES
from ray_hetero.kernels.layer_parts import QkvInput
from ray_hetero.kernels.post_attention import PostAttentionBlock
from ray_hetero.kernels.rank_sums import meeting
from ray_hetero.kernels.step_rows import StepRows
from ray_hetero.kernels.streaming_linear import StreamingLinear
from ray_hetero.kernels.token_rows import is_few_rows, token_rows


@dataclass(frozen=True)
class _Requests:
    """Requests of one token each, of which several may be one of vLLM's."""

    positions: torch.Tensor
    """[requests], int64; as the others."""
    slots: torch.Tensor
    lengths: torch.Tensor
    """[requests], int32."""
    blocks: torch.Tensor
    """[requests, most blocks], int32."""


class DecodeStep:
    """Computes steps of one token a request, or of a few.

    Args:
        first: how the first layer begins.
        layers: at least one, each with a known scale.
        kernel: what computes linear layers.

    """

    def __init__(
        self,
        first: QkvInput,
        layers: Sequence[tuple[Attention, PostAttentionBlock]],
        kernel: StreamingLinear,
    ) -> None:
        self._kernel = kernel
        self._names = [attention.name for attention, _ in layers]
        self._layers = kernel.native.DecoderLayers(
            first=first.native,
            layers=[(attention.rotation, attention.scale, block.native)
                    for attention, block in layers],
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
            or not is_few_rows(metadata, slots, tokens)
            or not is_known(cache, first.isa)
            or any(one is not metadata or other.stride() != cache.stride()
                   for one, _, other, _ in contexts)
        ):  # fmt: skip
            return None
        lengths, blocks = token_rows(metadata, tokens, cache.shape[2])
        requests = _Requests(positions, slots, lengths, blocks)
        return self._run(requests, contexts, hidden, residual)

    def decode(
        self,
        rows: StepRows,
        contexts: Sequence[Any],
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the decoding requests of a step that has others too.

        Args:
            rows: of the step, with at most as many decoding as a step may have.
            contexts: vLLM's forward context of each layer, with known caches.
            positions: of all tokens; so are the others.
            hidden: [M, N], bf16.
            residual: [M, N], bf16; None at the beginning of a model.

        Returns:
            As a call, for the decoding rows.

        """
        metadata, _, _, slots = contexts[0]
        own = rows.decoding_rows
        requests = _Requests(
            positions[own], slots[own], rows.decoding_lengths,
            metadata.block_table[rows.decoding],
        )  # fmt: skip
        return self._run(
            requests, contexts, hidden[own], None if residual is None else residual[own]
        )

    def _run(
        self, requests: _Requests, contexts: Sequence[Any], hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        _, first, cache, _ = contexts[0]
        hidden = hidden.contiguous()
        residual = None if residual is None else residual.contiguous()
        y, total = torch.empty_like(hidden), torch.empty_like(hidden)
        with meeting(self._kernel.sums):
            self._layers.run(
                requests=self._kernel.native.Requests(
                    m=len(requests.positions),
                    positions=requests.positions.data_ptr(),
                    slots=requests.slots.data_ptr(),
                    lengths=requests.lengths.data_ptr(),
                    blocks=requests.blocks.data_ptr(),
                    most_blocks=requests.blocks.stride(0),
                    block=cache.shape[2],
                    cache_blocks=cache.shape[0],
                    tiles=first.isa == TILES,
                ),
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


def is_known(cache: torch.Tensor, isa: str) -> bool:
    """[blocks, heads, tokens of a block, 2 · size], keys and values of a head neighbours."""
    return (
        isa in {TILES, ROWS}
        and cache.dtype == torch.bfloat16
        and cache.ndim == 4
        and cache.shape[2] % SPAN == 0
        and cache.stride()[2:] == (cache.shape[3], 1)
    )

"""vLLM's multi-head latent attention on a CPU rank: whose weights lie where, and what a step has.

vLLM has two backends for CPUs.  That for AMX keeps the two halves of `kv_b_proj` of each head
packed for products with tiles, the other one reads them out of the weight as it was loaded.
"""

from __future__ import annotations

from typing import Any

import torch

from ray_hetero.compat.patching import original, replace

KNOWN = ("AMXMLAImpl", "CPUMLAImpl")
"""Backends whose latents lie in blocks token by token, each with the rotated part of its key behind
it."""


def why_unknown(wrapper: Any) -> str:
    """Why the attention of a layer does more than is known; or "".

    Args:
        wrapper: vLLM's module around the products and the attention.

    Uses: `MultiHeadLatentAttentionWrapper`, `MLAAttention`, `AMXMLAImpl` and `CPUMLAImpl`.
    """
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

    attend: Any = getattr(wrapper, "mla_attn", None)
    if (
        getattr(type(wrapper), "forward", None) is not MultiHeadLatentAttentionWrapper.forward
        or type(attend) is not MLAAttention
        or type(attend.impl).__name__ not in KNOWN
    ):
        return f"the latent attention is another one ({type(wrapper).__name__})"
    if wrapper.indexer is not None or wrapper.is_sparse or wrapper.g_proj is not None:
        return "the latent attention is sparse, or has a gate"
    if (
        wrapper.dcp_q_replicate
        or attend.use_pcp
        or attend.impl.dcp_world_size > 1
        or attend.q_pad_num_heads is not None
        or attend.non_causal_multi_token_decode
        or attend.sliding_window is not None
    ):
        return "the latent attention is divided among ranks, or has a window"
    if attend.kv_cache_dtype not in {"auto", "bfloat16"}:
        return f"latents are kept as {attend.kv_cache_dtype}"
    return ""


def turn_all_heads() -> None:
    """Rotate all heads of queries [tokens, heads, size] on a CPU.

    Replaces: `RotaryEmbedding.forward_cpu`.
    Why: the native operator takes three dimensions for [batch, sequence, heads · size], and leaves
        most heads of a query of latent attention as they are: tokens are others than those of
        Transformers.  Rotations with a forward function of their own (YaRN), and compiled models,
        do not call it.
    Can go when: `MultiHeadLatentAttentionWrapper` gives the operator two dimensions, or it looks
        at the shape of the positions.
    """
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    def make(stock: Any) -> Any:
        def forward_cpu(
            self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            if positions.dim() == 1 and query.dim() > 2:
                found: tuple[torch.Tensor, torch.Tensor | None] = self.forward_native(
                    positions, query, key
                )
                return found
            rotated: tuple[torch.Tensor, torch.Tensor | None] = stock(self, positions, query, key)
            return rotated

        return forward_cpu

    replace(RotaryEmbedding, "forward_cpu", make)


def head_weights(attend: Any) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Weights that make keys and values of latents, for each head by itself.

    Args:
        attend: vLLM's `MLAAttention`, whose weights are loaded, see `why_unknown`.

    Returns:
        [heads, latent, plain part of a query], [heads, values, latent], and whether each head's
        matrix is packed, see `kernels.formats.base.pack`.

    Uses: `AMXMLAImpl._w_uk_packed`, `AMXMLAImpl._w_uv_packed`, and of `MLAAttention` `W_UK_T` and
    `W_UV`.
    """
    if type(attend.impl).__name__ == "AMXMLAImpl":
        names = ("_w_uk_packed", "_w_uv_packed")
        keys, values = (original(attend.impl, name) for name in names)
        return keys, values, True
    keys, values = (original(attend, name) for name in ("W_UK_T", "W_UV"))
    return keys.transpose(1, 2), values.transpose(1, 2), False


def blocks_of_tokens(metadata: Any, tokens: int, block: int) -> torch.Tensor | None:
    """The KV blocks of each token of a step, [tokens, blocks], int32.

    Args:
        metadata: vLLM's of the step.
        tokens: of the step.
        block: tokens of a block.

    Returns:
        None if the step is described in another way.

    Uses: `MLACommonMetadata`, where requests that decode are in front of all others.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata

    if (
        not isinstance(metadata, MLACommonMetadata)
        or metadata.num_actual_tokens != tokens
        or not metadata.causal
    ):
        return None
    parts = (metadata.decode, metadata.prefill)
    tables = [part.block_table for part in parts if part is not None]
    table = tables[0] if len(tables) == 1 else torch.cat(tables)
    starts = metadata.query_start_loc
    if table.dtype != torch.int32 or table.stride(1) != 1 or len(starts) != len(table) + 1:
        return None
    if metadata.max_query_len == 1:
        return table if len(table) == tokens else None
    request = torch.repeat_interleave(starts.diff(), output_size=tokens)
    return table[:, : -(-metadata.max_seq_len // block)][request]

"""A decode step's tokens, each as a request of its own.

The native decode step computes one token a request.  A request that verifies drafts has 1 + k of
them, which is 1 + k requests of ascending length over the same blocks: keys and values of all are
written before any of them is attended with.
"""

from __future__ import annotations

from typing import Any

import torch

MOST_ROWS = 16
"""Tokens of one request.  Longer chunks are left to vLLM's attention, which multiplies matrices; of
these, the tokens of a long request read its keys and values together (csrc/kernels/attention.h)."""


def token_rows(metadata: Any, tokens: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Length and blocks of each token.

    Args:
        metadata: vLLM's CPUAttentionMetadata of the step, as `is_few_rows` takes it.
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


def is_few_rows(metadata: Any, slots: torch.Tensor, tokens: int) -> bool:
    """Whether a step has a few tokens of each request, as vLLM's CPU backend describes it."""
    lengths, blocks, starts = metadata.seq_lens, metadata.block_table, metadata.query_start_loc
    return (
        metadata.max_query_len <= MOST_ROWS
        and metadata.num_actual_tokens == tokens
        and len(lengths) == len(blocks) == len(starts) - 1
        and (metadata.max_query_len > 1 or tokens == len(lengths))
        and len(slots) >= tokens
        and metadata.causal
        and metadata.dynamic_causal is None
        and (lengths.dtype, blocks.dtype, slots.dtype) == (torch.int32, torch.int32, torch.int64)
        and lengths.stride(0) == blocks.stride(1) == slots.stride(0) == 1
    )

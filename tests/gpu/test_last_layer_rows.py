"""FlashAttention from the rows of a prompt that are read, beside that from all of its rows.

tests/unit/worker/test_last_layer.py compares vLLM's attention for CPUs, test_layouts.py engines.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_host import IS_PRETENDED, needs_gpus
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata

from ray_hetero.worker.last_layer import LastLayer

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(1),
    pytest.mark.skipif(IS_PRETENDED, reason="FlashAttention needs a GPU"),
]
NAME = "layers.1"
HEADS, KV_HEADS, SIZE, BLOCK = 8, 2, 128, 128
STEP = [(900, 200), (400, 0), (21, 20)]
"""Tokens of each request, and how many of them are in the cache: a prompt's second chunk, a whole
prompt, and a request that decodes."""


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("window", [None, 300])
def test_attention_from_the_rows_that_are_read(window: int | None, padding: int) -> None:
    torch.manual_seed(0)
    impl = FlashAttentionImpl(
        HEADS, SIZE, SIZE**-0.5, KV_HEADS, alibi_slopes=None, sliding_window=window,
        kv_cache_dtype="auto",
    )  # fmt: skip
    cuda: Any = {"device": "cuda"}
    one = torch.ones(1, **cuda)
    layer = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)
    counts = [length - cached for length, cached in STEP]
    lengths = [length for length, _ in STEP] + padding * [0]
    starts = torch.tensor([0, *counts, *padding * [0]]).cumsum(0)
    most = -(-max(lengths) // BLOCK)
    table = torch.randperm(most * len(lengths), **cuda).int().view(len(lengths), most)
    cache = torch.zeros(table.numel(), KV_HEADS, BLOCK, 2 * SIZE, dtype=torch.bfloat16, **cuda)
    for request, (length, _) in enumerate(STEP):
        places = torch.arange(length, **cuda)
        slots = table[request].long()[places // BLOCK] * BLOCK + places % BLOCK
        keys, values = torch.randn(2, length, KV_HEADS, SIZE, dtype=torch.bfloat16, **cuda)
        impl.do_kv_cache_update(layer, keys, values, cache, slots)
    metadata = FlashAttentionMetadata(
        num_actual_tokens=sum(counts), max_query_len=max(counts),
        query_start_loc=starts.int().cuda(), max_seq_len=max(lengths),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, **cuda), block_table=table,
        slot_mapping=torch.empty(0, **cuda),
    )  # fmt: skip
    queries = torch.randn(sum(counts), HEADS, SIZE, dtype=torch.bfloat16, **cuda)
    expected, found = torch.empty_like(queries), torch.empty_like(queries)
    last = LastLayer(NAME, 1024)
    context = ForwardContext(no_compile_layers={}, attn_metadata={NAME: metadata}, slot_mapping={})
    with torch.inference_mode(), override_forward_context(context):
        for attend, output in (
            (impl.forward, expected),
            (partial(last.attend, impl.forward), found),
        ):
            attend(layer, queries, queries, queries, cache, metadata, output)
    rows = starts[1 : len(STEP) + 1] - 1
    torch.testing.assert_close(found[rows], expected[rows], rtol=2e-2, atol=5e-3)
    unread = torch.ones(len(found), dtype=torch.bool)
    unread[rows] = False
    assert not found[unread].any()

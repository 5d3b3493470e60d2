"""A request's few tokens of a step become requests of ascending length over its blocks."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
cpu_attn = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")

from ray_hetero.kernels.layers.decode_step import is_described, token_rows  # noqa: E402

BLOCK = 32


def described(counts: list[int], lengths: list[int], **changes: Any) -> Any:
    """vLLM's description of a step of so many tokens of requests with so many in all."""
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    table = torch.arange(8 * len(counts), dtype=torch.int32).view(len(counts), 8)
    slots = torch.arange(sum(counts))
    given = {
        "num_actual_tokens": sum(counts), "max_query_len": max(counts), "query_start_loc": starts,
        "max_seq_len": max(lengths), "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "block_table": table, "slot_mapping": slots, "scheduler_metadata": None,
    }  # fmt: skip
    return cpu_attn.CPUAttentionMetadata(**(given | changes))


def test_one_token_a_request_is_what_vllm_says() -> None:
    step = described([1, 1], [5, 70])
    assert is_described(step, step.slot_mapping, 2)
    lengths, blocks = token_rows(step, 2, BLOCK)
    assert lengths is step.seq_lens
    assert blocks is step.block_table


def test_a_token_attends_to_itself_and_to_those_before_it() -> None:
    step = described([3, 1, 4], [33, 7, 66])
    assert is_described(step, step.slot_mapping, 8)
    lengths, blocks = token_rows(step, 8, BLOCK)
    assert lengths.tolist() == [31, 32, 33, 7, 63, 64, 65, 66]
    assert lengths.dtype == blocks.dtype == torch.int32
    # Three blocks hold the longest request.
    assert blocks.tolist() == [[0, 1, 2]] * 3 + [[8, 9, 10]] + [[16, 17, 18]] * 4
    assert blocks.stride() == (3, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_actual_tokens": 3}, {"causal": False},
        {"dynamic_causal": torch.ones(2)}, {"seq_lens": torch.tensor([33, 7])},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_another_description_is_not_known(changes: dict[str, Any]) -> None:
    step = described([3, 1], [33, 7])
    assert is_described(step, step.slot_mapping, 4)
    other = described([3, 1], [33, 7], **changes)
    assert not is_described(other, other.slot_mapping, 4)
    assert not is_described(step, step.slot_mapping[:3], 4)

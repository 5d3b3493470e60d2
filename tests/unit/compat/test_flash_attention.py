"""What the operator of vLLM's FlashAttention 3 is given, by its schema; it itself needs a GPU."""

from __future__ import annotations

import pytest
import torch

from ray_hetero.compat.models.flash_attention import ASKED, UnexpectedArgumentError, others

SCHEMA = """_vllm_fa3_C::fwd(Tensor(a!) q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new,
Tensor? q_v, Tensor(b!)? out, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new,
Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table,
Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin,
Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale,
float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap,
bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa,
int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k)
-> Tensor[]"""
"""Of vLLM 0.32."""


def schema(text: str = SCHEMA) -> torch._C.FunctionSchema:
    return torch._C.parse_schema(" ".join(text.split()))


def test_every_argument_is_given_once() -> None:
    given = others(schema())
    assert given.keys() | ASKED == {argument.name for argument in schema().arguments}
    assert not given.keys() & ASKED
    assert (given["window_size_left"], given["softcap"], given["out"]) == (-1, 0.0, None)


@pytest.mark.parametrize("name", ["softmax_scale", "window_size_left"])
def test_an_argument_that_was_renamed_is_told(name: str) -> None:
    with pytest.raises(UnexpectedArgumentError, match=f"has no argument {name}"):
        others(schema(SCHEMA.replace(f" {name}", f" other_{name}")))


def test_an_argument_that_is_not_known_is_told() -> None:
    with pytest.raises(UnexpectedArgumentError, match="wants an argument sparsity"):
        others(schema(SCHEMA.replace("int cp_rank", "float sparsity, int cp_rank")))
    more = others(schema(SCHEMA.replace("int cp_rank", "Tensor? mask, int cp_rank")))
    assert more["mask"] is None

"""What layers cache, against arithmetic by hand, one model of each kind of attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from placement.model.built import shape_from_parts
from placement.model.caches import cache_of, caches_only_vllm_knows
from placement.model.config import Config
from placement.model.reading import shape_from_config
from placement.model.shape import ModelShape
from placement.model.tensors import KvCache
from placement.plan.memory import kv_bytes
from placement.plan.passes import decode_pass, prefill_pass
from placement.units import GIB

MODELS = Path(__file__).parents[1] / "data" / "models"
PARTS = Path(__file__).parents[1] / "data" / "built"


def published(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def from_vllm(name: str) -> ModelShape:
    """The shape of a published model from vLLM's answer (tools/write_built_models.py)."""
    parts = json.loads((PARTS / f"{name}.json").read_text(encoding="utf-8"))
    return shape_from_parts(parts, published(name))


def test_full_attention() -> None:
    # Llama 3.3 70B: keys and values of 8 heads of 128 in 2 bytes, 80 layers.
    shape = shape_from_config(published("llama-3.3-70b"))
    assert shape.kv_bytes_per_token() == 2 * 8 * 128 * 2 * 80 == 320 * 1024
    assert shape.kv_bytes(32768, 2048) == 10 * GIB


def test_sliding_windows() -> None:
    # gpt-oss-120b: 36 layers of 2 * 8 * 64 * 2 = 2,048 bytes a token; every other one sees 128.
    shape = shape_from_config(published("gpt-oss-120b"))
    assert shape.kv_bytes(131072, 1) == 18 * 2048 * (131072 + 128)
    assert shape.kv_bytes(131072, 1) / GIB == pytest.approx(4.5, abs=0.01)
    assert shape.kv_bytes(131072, 2048) == 18 * 2048 * (131072 + 127 + 2048)
    assert shape.kv_bytes_per_token() == 18 * 2048


def test_latents() -> None:
    # DeepSeek R1: 512 + 64 values of 2 bytes, once for all heads, 61 layers.
    assert shape_from_config(published("deepseek-r1")).kv_bytes_per_token() == 576 * 2 * 61


def test_latents_with_an_indexer() -> None:
    # DeepSeek V3.2: beside them an indexer's key of 128 bytes and a scale of 4.
    assert from_vllm("deepseek-v3.2").kv_bytes_per_token() == (576 * 2 + 128 + 4) * 61


def test_gated_delta_net() -> None:
    # Qwen3-Next: 12 of 48 layers with 2 heads of 256; 36 with 32 matrices of 128 * 128 in float32
    # and the last 3 inputs of a convolution of 2 * 16 * 128 + 32 * 128 channels.
    shape = from_vllm("qwen3-next-80b-a3b")
    assert shape.kv_bytes_per_token() == 12 * 2 * 2 * 256 * 2
    state = 32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2
    assert shape.kv_bytes(32768, 1) == 0.75 * GIB + 36 * state


def test_mamba() -> None:
    # Nemotron 3 Nano: 6 of 52 layers with 2 heads of 128; 23 with 64 states of 64 * 128 in float32
    # and the last 3 inputs of a convolution of 64 * 64 + 2 * 8 * 128 channels.
    shape = from_vllm("nemotron-3-nano-30b")
    assert shape.kv_bytes_per_token() == 6 * 2 * 2 * 128 * 2
    states = {layer.kv.state_bytes for layer in shape.layers if layer.kv is not None}
    assert states == {0, 64 * 64 * 128 * 4 + (64 * 64 + 2 * 8 * 128) * 3 * 2}


def test_attention_and_mamba_in_one_layer() -> None:
    # Falcon-H1 34B: 72 layers, each with 4 heads of 128 and a state of 32 * 128 * 256.
    shape = from_vllm("falcon-h1-34b")
    caches = [layer.kv for layer in shape.layers]
    assert {(kv.bytes_per_token, kv.state_bytes) for kv in caches if kv is not None} == {
        (2 * 4 * 128 * 2, 32 * 128 * 256 * 4 + (32 * 128 + 2 * 2 * 256) * 3 * 2)
    }


def test_short_convolution() -> None:
    # LFM2 8B-A1B: 6 of 24 layers with 8 heads of 64; 18 with the last 2 inputs of 2,048 channels.
    for shape in (from_vllm("lfm2-8b-a1b"),):
        assert shape.kv_bytes(1000, 1) == 6 * 2 * 8 * 64 * 2 * 1000 + 18 * 2 * 2048 * 2


def test_heads_of_two_sizes() -> None:
    # Gemma 4 26B-A4B: 25 layers of 8 heads of 256 that see 1,024, 5 of 2 heads of 512.
    shape = from_vllm("gemma-4-26b-a4b")
    windows, full = 2 * 8 * 256 * 2, 2 * 2 * 512 * 2
    assert shape.kv_bytes(131072, 1) == 25 * windows * 1024 + 5 * full * 131072


def test_chunks_of_attention_are_kept_whole() -> None:
    # Llama 4 Scout: vLLM frees nothing behind a chunk, unless an environment variable asks it to.
    shape = from_vllm("llama-4-scout")
    assert shape.kv_bytes(131072, 1) == 48 * 2 * 8 * 128 * 2 * 131072
    seen = [layer.kv.seen(131072) for layer in shape.layers if layer.kv is not None]
    assert (seen.count(8192), seen.count(131072)) == (36, 12)


def test_a_rank_keeps_its_part_of_heads_and_of_a_state() -> None:
    cache = KvCache(1024, 4, state_bytes=1000, beside=(KvCache(10, 1, window=8),))
    assert cache.rank_held(1, 100, 1) == 1024 * 100 + 1000 + 10 * 8
    assert cache.rank_held(2, 100, 1) == 512 * 100 + 500 + 10 * 8
    assert cache.rank_held(8, 100, 1) == 256 * 100 + 125 + 10 * 8
    # A step reads the window, and reads and writes the state.
    assert cache.rank_read(2, 100) == 512 * 100 + 2 * 500 + 10 * 8


def test_the_planner_counts_states_once_a_sequence() -> None:
    (layer,) = {one for one in from_vllm("lfm2-8b-a1b").layers if one.index == 0}
    assert kv_bytes(layer, 1, 100, 3, 16) == kv_bytes(layer, 1, 100_000, 3, 16) == 3 * 8192


def test_drafts_take_states_of_their_own() -> None:
    # Three drafts: a state behind each and one before them, all with inputs of 3 more tokens.
    matrices, channels = 32 * 128 * 128 * 4, 2 * 16 * 128 + 32 * 128
    state = 4 * (matrices + channels * (3 + 3) * 2)
    keys = 12 * 2 * 2 * 256 * 2
    shape = from_vllm("qwen3-next-80b-a3b")
    assert shape.kv_bytes(1024, 1, drafts=3) == keys * 1024 + 36 * state
    config = published("qwen3-next-80b-a3b") | {"layer_types": ["linear_attention"]}
    assert cache_of(Config(config), 0, 2).rank_held(1, 1024, 1, 3) == state
    # A short convolution keeps inputs only.
    lfm2 = 6 * 2 * 8 * 64 * 2 * 1000 + 18 * 4 * 2048 * (2 + 3) * 2
    assert from_vllm("lfm2-8b-a1b").kv_bytes(1000, 1, drafts=3) == lfm2
    config = published("lfm2-8b-a1b")
    assert cache_of(Config(config), 0, 2).rank_held(1, 1000, 1, 3) == 4 * 2048 * (2 + 3) * 2
    # Layers without a state keep nothing more.
    plain = shape_from_config(published("llama-3.3-70b"))
    assert plain.kv_bytes(1024, 1, drafts=3) == plain.kv_bytes(1024, 1)


def test_states_of_drafts_are_divided_among_ranks_and_written_in_a_step() -> None:
    cache = KvCache(1024, 4, state_bytes=1000, draft_bytes=100)
    assert cache.rank_held(2, 100, 1, drafts=2) == 512 * 100 + 3 * 600
    assert cache.rank_read(2, 100, drafts=2) == 512 * 100 + (1 + 3) * 600
    assert decode_pass(4, 100, 2).drafts == 2
    assert prefill_pass(100).drafts == 0


@pytest.mark.parametrize(
    ("changed", "unknown"),
    [
        ({}, ""),
        ({"layer_types": ["linear_attention", "full_attention"]}, ""),
        ({"layer_types": ["conv", "sliding_attention"], "sliding_window": 4}, ""),
        ({"layer_types": ["retnet", "full_attention"]}, "what layers of the type retnet cache"),
        ({"sliding_window": 4}, "which of its layers have a sliding window"),
        ({"mamba_d_state": 16}, "what mamba_d_state means for the caches of its layers"),
        ({"num_kv_shared_layers": 3}, "what num_kv_shared_layers means for the caches"),
        ({"num_kv_shared_layers": 0}, ""),
        ({"model_type": "mixtral", "sliding_window": 4}, ""),
    ],
)
def test_what_a_config_does_not_tell_of_caches(changed: dict[str, Any], unknown: str) -> None:
    config = {"model_type": "zebra", "num_hidden_layers": 2, "hidden_size": 8, **changed}
    found = caches_only_vllm_knows(Config(config))
    assert found.startswith(unknown)
    assert bool(found) == bool(unknown)

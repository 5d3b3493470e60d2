"""The KV cache of stages of several sizes: as many blocks on every rank, each with own heads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from worlds import layout

from ray_hetero.cli.demo.model import DemoShape, write_demo_model
from ray_hetero.compat.worker import kv_cache
from ray_hetero.executor.kv_shares import KvShares, heads_of_rank

BLOCK, HEAD = 128, 64


def model(kv_heads: int) -> Any:
    return SimpleNamespace(get_total_num_kv_heads=lambda: kv_heads)


def full(heads: int) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=heads, head_size=HEAD, dtype=torch.bfloat16
    )


def window(heads: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=heads, head_size=HEAD, dtype=torch.bfloat16,
        sliding_window=256,
    )  # fmt: skip


def latent(heads: int) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = write_demo_model(
        tmp_path_factory.mktemp("llama"), shape=DemoShape(layers=4, hidden=64, heads=2)
    )
    config = EngineArgs(model=str(path), max_model_len=1024).create_engine_config()
    config.cache_config.kv_cache_layout = "LBNHC"
    return config


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "kept"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (2, 8, 1), (1, 2, 1)]
)
def test_heads_of_a_rank(kv_heads: int, ranks: int, kept: int) -> None:
    assert heads_of_rank(kv_heads, ranks) == kept


@pytest.mark.parametrize("kinds", [(full,), (full, window), (latent,)])
@pytest.mark.parametrize(
    "available", [(100 << 20, 100 << 20, 400 << 20), (400 << 20, 400 << 20, 100 << 20)]
)
def test_every_rank_has_as_many_blocks_within_its_memory(
    kinds: tuple[Any, ...], available: tuple[int, ...], vllm_config: Any
) -> None:
    specs = [
        {
            f"layers.{first + number}": kind(heads)
            for number, kind in enumerate(kind for kind in kinds for _ in range(2))
        }
        for first, heads in ((0, 4), (0, 4), (10, 8))
    ]
    shares = KvShares(specs, layout("cc", "g"), model(8))
    planned = kv_cache.planning().get_kv_cache_configs(
        vllm_config, shares.common, shares.common_bytes(list(available))
    )
    own = shares.own(planned, vllm_config)
    blocks = own[0].num_blocks
    assert {config.num_blocks for config in own} == {blocks}
    sizes = []
    for config, mine, there in zip(own, specs, available, strict=True):
        pages = {
            name: group.kv_cache_spec
            for group in config.kv_cache_groups
            for name in group.layer_names
        }
        for name, spec in mine.items():
            held = getattr(pages[name], "kv_cache_specs", {name: pages[name]})[name]
            assert held.num_kv_heads == spec.num_kv_heads
        size = max(tensor.size for tensor in config.kv_cache_tensors)
        assert size <= there
        sizes.append(size)
    # The smallest rank decides, and its memory is used.
    fullest = max(size / there for size, there in zip(sizes, available, strict=True))
    assert fullest == pytest.approx(1, abs=0.05)
    ratio = 1 if kinds == (latent,) else 2
    assert sizes[2] == ratio * sizes[0]


def test_stages_of_one_size_are_left_alone() -> None:
    specs = [{"layers.0": full(4)}, {"layers.1": full(4)}]
    shares = KvShares(specs, layout("c", "g"), model(4))
    assert shares.common == specs
    assert shares.common_bytes([7, 11]) == [7, 11]
    configs = [object(), object()]
    assert shares.own(configs, None) == configs  # type: ignore[arg-type]

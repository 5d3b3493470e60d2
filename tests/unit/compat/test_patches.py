"""Patches that are made twice act once, with what they were made with last."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
)
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_worker import CPUWorker

from placement.host import native
from ray_hetero.compat.models import cpu_linear
from ray_hetero.compat.worker import cpu_worker, kv_cache, model_runner
from ray_hetero.compat.worker import parallel_state as our_parallel_state


def test_memory_is_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    bound: list[Any] = []
    monkeypatch.setattr(CPUWorker, "init_device", lambda self: begun.append("device"))
    monkeypatch.setattr(native, "set_membind", bound.append)
    cpu_worker.bind_memory_to((0,))
    cpu_worker.bind_memory_to((0, 1))
    CPUWorker.init_device(SimpleNamespace())
    assert (begun, bound) == (["device"], [(0, 1)])


def test_a_layer_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(
        utils, "dispatch_cpu_unquantized_gemm", lambda layer, remove_weight: taken.append("vLLM's")
    )
    for name, columns in (("first", 8), ("second", 16)):
        cpu_linear.use_linear(
            lambda x, packed, bias: x,
            suits=lambda weight, columns=columns: weight.shape[1] == columns,
            pack=lambda layer, name=name: taken.append(name),
        )
    for columns in (16, 8):
        layer = torch.nn.Linear(columns, 4)
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    # What the second does not suit goes to vLLM, not to the first.
    assert taken == ["second", "vLLM's"]


def test_embeddings_are_kept_as_was_said_last(monkeypatch: pytest.MonkeyPatch) -> None:
    stock: list[Any] = []
    name = "process_weights_after_loading"
    monkeypatch.setattr(UnquantizedEmbeddingMethod, name, lambda self, layer: stock.append(layer))
    cpu_linear.keep_embeddings_once(has_tied_output=False)
    cpu_linear.keep_embeddings_once(has_tied_output=True)
    UnquantizedEmbeddingMethod().process_weights_after_loading("layer")
    assert stock == ["layer"]


def test_samples_are_shared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[Any] = []
    group = SimpleNamespace(broadcast=lambda tokens: shared.append(tokens) or [0])
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: group)
    runner = SimpleNamespace(_sample=lambda: SimpleNamespace(sampled_token_ids=[1]))
    for _ in range(2):
        model_runner.share_samples(runner)
    assert runner._sample().sampled_token_ids == [0]
    assert shared == [[1]]


def test_the_platforms_own_backend_is_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_platform, "dist_backend", "as it was")
    own = type(current_platform).dist_backend
    assert [our_parallel_state.use_gloo_world() for _ in range(2)] == [own, own]
    assert current_platform.dist_backend == "gloo"


def test_a_kv_cache_lies_in_memory_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = gpu_model_runner.allocate_kv_cache
    monkeypatch.setattr(gpu_model_runner, "allocate_kv_cache", stock)
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    page, blocks, names = spec.page_size_bytes, 3, ["first", "second"]
    tensor = KVCacheTensor(2 * blocks * page, names, layer_stride=blocks * page, block_stride=page)
    config = KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec(names, spec)])
    arguments = config, torch.device("cpu"), KVCacheLayout.LBHNC, [32]
    expected = stock(*arguments)
    given: list[torch.Tensor] = []

    def memory(nbytes: int) -> torch.Tensor:
        given.append(torch.zeros(nbytes + 64, dtype=torch.uint8))
        return given[-1]

    for _ in range(2):
        kv_cache.place_in(memory)
    found = gpu_model_runner.allocate_kv_cache(*arguments)
    assert [len(one) for one in given] == [2 * blocks * page + 64]
    for name, theirs in expected.items():
        ours = found[name]
        assert ours.untyped_storage().data_ptr() == given[0].data_ptr()
        assert (ours.dtype, ours.shape, ours.stride(), ours.storage_offset()) == (
            theirs.dtype, theirs.shape, theirs.stride(), theirs.storage_offset(),
        )  # fmt: skip

    def nothing(nbytes: int) -> torch.Tensor:
        raise OSError("no more")

    kv_cache.place_in(nothing)
    left = gpu_model_runner.allocate_kv_cache(*arguments)
    assert left["second"].shape == expected["second"].shape
    assert len(given) == 1

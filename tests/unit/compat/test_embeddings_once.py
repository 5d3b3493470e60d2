"""Embeddings and output matrices that a CPU rank holds once, or whole, with vLLM's own kernels."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform

from ray_hetero.compat.models.cpu_linear import hold_embedding_whole, keep_embeddings_once

VOCABULARY, HIDDEN = 128, 64


@pytest.fixture(autouse=True)
def _patched_for_one_test(monkeypatch: pytest.MonkeyPatch) -> None:
    current_platform.import_kernels()
    name = "process_weights_after_loading"
    monkeypatch.setattr(UnquantizedEmbeddingMethod, name, vars(UnquantizedEmbeddingMethod)[name])
    monkeypatch.setattr(VocabParallelEmbedding, "__init__", VocabParallelEmbedding.__init__)


def layer_of(kind: type[torch.nn.Module]) -> torch.nn.Module:
    """A layer with weights, without the groups that vLLM's own constructor asks for."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    # In float32 vLLM packs matrices on every processor, in bfloat16 only where there is AVX-512.
    weight = torch.randn(VOCABULARY, HIDDEN)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


def loaded(kind: type[torch.nn.Module]) -> tuple[torch.nn.Module, torch.Tensor]:
    """A layer as it is after loading, and its weights."""
    layer = layer_of(kind)
    weight = layer.weight.clone()
    UnquantizedEmbeddingMethod().process_weights_after_loading(layer)
    return layer, weight


def multiplied(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return UnquantizedEmbeddingMethod().apply(layer, x)


def test_an_output_matrix_is_held_packed_only() -> None:
    keep_embeddings_once(has_tied_output=False)
    head, weight = loaded(ParallelLMHead)
    assert head.weight.numel() == 0
    x = torch.randn(3, HIDDEN)
    torch.testing.assert_close(multiplied(head, x), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_an_embedding_is_held_as_it_is_only() -> None:
    keep_embeddings_once(has_tied_output=False)
    embedding, weight = loaded(VocabParallelEmbedding)
    assert embedding.cpu_linear is torch.nn.functional.linear
    looked_up = UnquantizedEmbeddingMethod().embedding(embedding, torch.tensor([5, 7]))
    assert torch.equal(looked_up, weight[[5, 7]])


@pytest.mark.parametrize("kind", [ParallelLMHead, VocabParallelEmbedding])
def test_a_matrix_that_is_both_is_held_in_both_ways(kind: type[torch.nn.Module]) -> None:
    keep_embeddings_once(has_tied_output=True)
    layer, weight = loaded(kind)
    assert torch.equal(layer.weight, weight)
    assert layer.cpu_linear is not torch.nn.functional.linear


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this be the second rank of a group, which is not there to add up with."""
    for name, value in (("rank", 1), ("world_size", 2)):
        monkeypatch.setattr(
            vocab_parallel_embedding, f"get_tensor_model_parallel_{name}", lambda value=value: value
        )


@pytest.mark.parametrize("vocabulary", [VOCABULARY, VOCABULARY - 5])
@pytest.mark.usefixtures("second_of_two")
def test_an_embedding_is_loaded_and_looked_up_in_whole(vocabulary: int) -> None:
    for _ in range(2):
        hold_embedding_whole(vocabulary, HIDDEN)
    layer = VocabParallelEmbedding(vocabulary, embedding_dim=HIDDEN)
    checkpoint = torch.randn(vocabulary, HIDDEN)
    layer.weight_loader(layer.weight, checkpoint)
    assert layer.weight.shape == (VOCABULARY, HIDDEN)
    assert torch.equal(layer.weight[:vocabulary], checkpoint)
    assert not layer.weight[vocabulary:].any()
    tokens = torch.tensor([0, vocabulary - 1, 70, 3], dtype=torch.int32)
    assert torch.equal(layer(tokens), checkpoint[tokens.long()])


@pytest.mark.parametrize(
    ("kind", "size", "given"),
    [
        (ParallelLMHead, HIDDEN, {}),
        (VocabParallelEmbedding, 2 * HIDDEN, {}),
        (VocabParallelEmbedding, HIDDEN, {"reduce_results": False}),
        (VocabParallelEmbedding, HIDDEN, {"disable_tp": False}),
    ],
    ids=["output matrix", "another table", "added up by the model", "as the model says"],
)
@pytest.mark.usefixtures("second_of_two")
def test_other_matrices_are_cut(kind: Any, size: int, given: Any) -> None:
    hold_embedding_whole(VOCABULARY, HIDDEN)
    layer = kind(VOCABULARY, size, **given)
    assert (layer.tp_rank, layer.tp_size) == (1, 2)
    assert layer.weight.shape == (VOCABULARY // 2, size)


def test_vllms_embedding_takes_what_is_given() -> None:
    given = inspect.signature(VocabParallelEmbedding.__init__).parameters
    assert list(given)[1:3] == ["num_embeddings", "embedding_dim"]
    own = ("disable_tp", "reduce_results", "quant_method", "parallel_group")
    assert {given[name].kind for name in own} == {inspect.Parameter.KEYWORD_ONLY}

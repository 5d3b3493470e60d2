"""Embeddings of prompts lie where the GPU reads them; it is the CPU here."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from decoder_parts import HIDDEN  # noqa: E402
from group_steps import GroupSteps  # noqa: E402
from native_module import needs_native  # noqa: E402
from paged_steps import Steps  # noqa: E402
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase  # noqa: E402
from vllm.model_executor.layers.vocab_parallel_embedding import (  # noqa: E402
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.kernels.layers import layer_fusion  # noqa: E402
from ray_hetero.kernels.layers.fusible_layers import find  # noqa: E402
from ray_hetero.kernels.prompts import gpu_prefill, step_memory  # noqa: E402
from ray_hetero.kernels.prompts.embedded_prompts import look_up_for  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native
VOCABULARY, LEAST = 200, 8


@pytest.fixture(autouse=True)
def _small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_prefill, "LEAST_BYTES", 1)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens of each input that is copied to where the GPU reads it."""
    found: list[int] = []
    gathered = step_memory._gathered

    def gather_and_note(x: torch.Tensor, rows: Any, host: torch.Tensor) -> torch.Tensor:
        found.append(len(gathered(x, rows, host)))
        return gathered(x, rows, host)

    monkeypatch.setattr(step_memory, "_gathered", gather_and_note)
    return found


def embedding(dtype: torch.dtype = torch.bfloat16, size: int = 1, kind: Any = None) -> Any:
    """A layer, without the groups that vLLM's own constructor asks for."""
    kind = kind or VocabParallelEmbedding
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    weight = torch.randn(VOCABULARY, HIDDEN).to(dtype)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.quant_method, layer.tp_size = UnquantizedEmbeddingMethod(), size
    return layer


class Quantised(QuantizeMethodBase):  # type: ignore[misc]
    """A method of a checkpoint's own, whose layers need not have a matrix of rows."""

    def create_weights(self, layer: Any, *given: Any, **more: Any) -> None:
        raise NotImplementedError

    def apply(self, layer: Any, *given: Any, **more: Any) -> torch.Tensor:
        raise NotImplementedError

    def embedding(self, layer: Any, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens, layer.weight)


def model_of(*layers: Any) -> Any:
    return torch.nn.ModuleList(layers)


def test_steps_give_what_copied_embeddings_give(
    monkeypatch: pytest.MonkeyPatch, copied: list[int]
) -> None:
    steps, layer = Steps(monkeypatch, layers=3, share=0.4, most=512), embedding()
    assert look_up_for(steps.kernel.prompts, model_of(layer))
    one, other = steps.request(320), steps.request(40)
    tokens = {
        request: torch.randint(VOCABULARY, (len(request.inputs),)) for request in (one, other)
    }
    for request, own in tokens.items():
        request.inputs.copy_(layer.weight[own])
    begin = steps.begin

    def begin_embedded(parts: Any) -> tuple[Any, Any]:
        positions, hidden = begin(parts)
        looked_up = layer(torch.cat([tokens[request][b:e] for request, b, e in parts]))
        assert torch.equal(looked_up, hidden)
        return positions, looked_up

    monkeypatch.setattr(steps, "begin", begin_embedded)
    steps.check((one, 0, 70))
    steps.check((one, 70, 270), (other, 0, 30))
    assert copied == []
    for at in range(3):
        steps.check((one, 270 + at, 271 + at), (other, 30 + at, 31 + at))
    # Beside a request that decodes, the prompt's rows are some of all.
    steps.check((one, 273, 274), (other, 33, 40))
    steps.check((one, 274, 314))
    assert 40 not in copied


def test_a_prompt_takes_no_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, layer = Steps(monkeypatch, most=64), embedding()
    assert look_up_for(steps.kernel.prompts, model_of(layer, embedding(kind=ParallelLMHead)))
    places = set()
    for count in (LEAST, 33, 64):
        tokens = torch.randint(VOCABULARY, (count,), dtype=torch.int32)
        found = layer(tokens)
        assert torch.equal(found, layer.weight[tokens.long()])
        places.add(found.data_ptr())
    assert len(places) == 1
    for few_or_many in (LEAST - 1, 65):
        tokens = torch.randint(VOCABULARY, (few_or_many,))
        found = layer(tokens)
        assert torch.equal(found, layer.weight[tokens])
        assert found.data_ptr() not in places
    square = torch.randint(VOCABULARY, (4, 8))
    assert torch.equal(layer(square), layer.weight[square])
    steps.kernel.prompts.from_tokens = 34  # as a slow link raises them
    for count, is_there in ((33, False), (34, True)):
        assert (layer(torch.arange(count)).data_ptr() in places) is is_there


@pytest.mark.parametrize("problem", ["float32", "sliced", "two", "compiled", "quantised"])
def test_other_embeddings_stay_as_they_are(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, most=64)
    layer = embedding(
        dtype=torch.float32 if problem == "float32" else torch.bfloat16,
        size=2 if problem == "sliced" else 1,
    )
    model = model_of(layer, *([embedding()] if problem == "two" else []))
    model.do_not_compile = problem != "compiled"
    if problem == "quantised":
        layer.quant_method = Quantised()
    # That of a float32 model is looked at in each step.
    assert look_up_for(steps.kernel.prompts, model) is (problem == "float32")
    layer.tp_size = 1
    tokens = torch.arange(20)
    first = layer(tokens)
    assert first.data_ptr() != layer(tokens).data_ptr()
    assert torch.equal(first, layer.weight[:20])


def test_ranks_of_a_group_look_up_in_memory_that_stays(
    monkeypatch: pytest.MonkeyPatch, copied: list[int]
) -> None:
    steps, layer = GroupSteps(monkeypatch, count=2, most=512), embedding()
    layers = [copy.copy(layer) for _ in steps.ranks]
    for own, (group, *_) in zip(layers, steps.join(), strict=True):
        own.quant_method = UnquantizedEmbeddingMethod()
        assert look_up_for(group, model_of(own))
    one, other = steps.request(320), steps.request(40)
    tokens = {
        request: torch.randint(VOCABULARY, (len(request.inputs),)) for request in (one, other)
    }
    for request, own in tokens.items():
        request.inputs.copy_(layer.weight[own])
    places: list[set[int]] = [set() for _ in layers]

    def check(*parts: Any) -> None:
        asked = torch.cat([tokens[request][begin:end] for request, begin, end in parts])
        with monkeypatch.context() as patched:
            for rank, own, found in zip(steps.ranks, layers, places, strict=True):

                def embedded(
                    positions: Any, hidden: Any, residual: Any, made: Any = rank.made,
                    own: Any = own, found: set[int] = found,
                ) -> Any:  # fmt: skip
                    looked_up = own(asked)
                    assert torch.equal(looked_up, hidden)
                    if len(asked) >= LEAST:
                        found.add(looked_up.data_ptr())
                    return made(positions, looked_up, residual)

                patched.setattr(rank, "made", embedded)
            steps.check(*parts)

    check((one, 0, 70))
    check((one, 70, 270), (other, 0, 30))
    # Each rank has one place, which in the first one is that of the GPU's input.
    assert [len(found) for found in places] == [1, 1]
    assert places[0] != places[1]
    assert copied == []
    for at in range(3):
        check((one, 270 + at, 271 + at), (other, 30 + at, 31 + at))
    check((one, 273, 274), (other, 33, 40))
    check((one, 274, 314))
    assert 40 not in copied


@pytest.mark.parametrize("has_memory", [True, False])
def test_it_is_where_a_gpu_computes_all_layers(
    has_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, layers=2)
    asked: list[Any] = []
    monkeypatch.setattr(layer_fusion, "look_up_for", lambda *given: asked.append(given))
    if not has_memory:
        monkeypatch.setattr(layer_fusion, "_memory", lambda *given: None)
    kernel = steps.kernel
    layer_fusion.fuse(torch.nn.Sequential(steps.decoder), steps.linears, kernel)
    expected = [(kernel.prompts, steps.decoder)]
    assert asked == expected * has_memory


def test_it_is_so_on_all_ranks_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = GroupSteps(monkeypatch)
    asked: list[Any] = []
    monkeypatch.setattr(layer_fusion, "look_up_for", lambda *given: asked.append(given))
    groups = steps.join()
    for rank, group in zip(steps.ranks, groups, strict=True):
        found = find(torch.nn.Sequential(rank.decoder), rank.linears, rank.kernel)
        layer_fusion.install(found, rank.kernel, group)
    assert asked == [
        (group, rank.decoder) for rank, (group,) in zip(steps.ranks, groups, strict=True)
    ]

"""Embeddings of prompts lie where the GPU reads them; it is the CPU here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from decoder_parts import HIDDEN, fuse_model  # noqa: E402
from embeddings import VOCABULARY, embedding, model_of  # noqa: E402
from group_steps import GroupSteps  # noqa: E402
from native_module import needs_native  # noqa: E402
from paged_steps import Steps  # noqa: E402
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase  # noqa: E402
from vllm.model_executor.layers.vocab_parallel_embedding import (  # noqa: E402
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.kernels.layers.fusible_layers import find  # noqa: E402
from ray_hetero.offload import layer_fusion  # noqa: E402
from ray_hetero.offload.prefill import embedded_prompts, offload_gpu, step_memory  # noqa: E402
from ray_hetero.offload.prefill.embedded_prompts import EmbeddedRows, look_up_for  # noqa: E402
from ray_hetero.offload.prefill.step_memory import StepMemory  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native
LEAST = 24
CPU, STREAM = torch.device("cpu"), torch.cpu.Stream()


@pytest.fixture(autouse=True)
def _small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_gpu, "LEAST_BYTES", 1)


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


@pytest.fixture
def sent_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens of each input that was sent while it was looked up."""
    found: list[int] = []
    take = EmbeddedRows.take

    def take_and_note(self: EmbeddedRows, rows: torch.Tensor) -> torch.Tensor | None:
        there = take(self, rows)
        if there is not None:
            found.append(len(there))
        return there

    monkeypatch.setattr(EmbeddedRows, "take", take_and_note)
    return found


class Quantised(QuantizeMethodBase):  # type: ignore[misc]
    """A method of a checkpoint's own, whose layers need not have a matrix of rows."""

    def create_weights(self, layer: Any, *given: Any, **more: Any) -> None:
        raise NotImplementedError

    def apply(self, layer: Any, *given: Any, **more: Any) -> torch.Tensor:
        raise NotImplementedError

    def embedding(self, layer: Any, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens, layer.weight)


def test_steps_give_what_copied_embeddings_give(
    monkeypatch: pytest.MonkeyPatch, copied: list[int], sent_before: list[int]
) -> None:
    steps, layer = Steps(monkeypatch, layers=3, columns=8, most=512), embedding()
    assert look_up_for(steps.kernel, steps.kernel.gpu, model_of(layer))
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
    assert sent_before == [70, 230]
    for at in range(3):
        steps.check((one, 270 + at, 271 + at), (other, 30 + at, 31 + at))
    # Beside a request that decodes, the prompt's rows are some of all.
    steps.check((one, 273, 274), (other, 33, 40))
    steps.check((one, 274, 314))
    assert 40 not in copied
    assert sent_before == [70, 230, 40]


@pytest.mark.parametrize("is_in_place", [True, False])
def test_models_that_scale_their_embedding(
    is_in_place: bool, monkeypatch: pytest.MonkeyPatch, sent_before: list[int]
) -> None:
    steps, layer = Steps(monkeypatch, family="granite", most=512), embedding()
    assert look_up_for(steps.kernel, steps.kernel.gpu, model_of(layer))
    request = steps.request(100)
    tokens = torch.randint(VOCABULARY, (100,))
    request.inputs.copy_(layer.weight[tokens] * 8)
    begin = steps.begin

    def begin_embedded(parts: Any) -> tuple[Any, Any]:
        positions, hidden = begin(parts)
        looked_up = layer(tokens)
        if is_in_place:
            looked_up *= 8
        else:
            looked_up = looked_up * 8
        assert torch.equal(looked_up, hidden)
        return positions, looked_up

    monkeypatch.setattr(steps, "begin", begin_embedded)
    with torch.inference_mode():
        steps.check((request, 0, 100))
    assert sent_before == []


def test_a_prompt_takes_no_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, layer = Steps(monkeypatch, most=64, least=LEAST), embedding()
    model = model_of(layer, embedding(kind=ParallelLMHead))
    assert look_up_for(steps.kernel, steps.kernel.gpu, model)
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
    steps.kernel.limits = replace(steps.kernel.limits, gpu_from=34)  # as a slow link raises them
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
    is_there = look_up_for(steps.kernel, steps.kernel.gpu, model) is not None
    assert is_there is (problem == "float32")
    layer.tp_size = 1
    tokens = torch.arange(20)
    first = layer(tokens)
    assert first.data_ptr() != layer(tokens).data_ptr()
    assert torch.equal(first, layer.weight[:20])


def test_ranks_of_a_group_look_up_in_memory_that_stays(
    monkeypatch: pytest.MonkeyPatch, copied: list[int], sent_before: list[int]
) -> None:
    steps, layer = GroupSteps(monkeypatch, count=2, most=512), embedding()
    layers = [copy.copy(layer) for _ in steps.ranks]
    for rank, own, (group, *_) in zip(steps.ranks, layers, steps.join(), strict=True):
        own.quant_method = UnquantizedEmbeddingMethod()
        assert look_up_for(rank.kernel, group.gpu, model_of(own))
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
    assert sent_before == [70, 230]
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
    fuse_model(torch.nn.Sequential(steps.decoder), steps.linears, kernel)
    expected = [(kernel, kernel.gpu, steps.decoder)]
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
        (rank.kernel, group.gpu, rank.decoder)
        for rank, (group,) in zip(steps.ranks, groups, strict=True)
    ]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> StepMemory:
    """Memory of steps, with embeddings that are sent in several spans."""
    monkeypatch.setattr(embedded_prompts, "SPAN", 16)
    return StepMemory(CPU, 64, inputs=HIDDEN, outputs=HIDDEN, hidden=HIDDEN)


@pytest.fixture
def table() -> torch.Tensor:
    return torch.randn(VOCABULARY, HIDDEN).bfloat16()


def sent(
    memory: StepMemory, hidden: torch.Tensor, rows: torch.Tensor | slice = slice(None)
) -> torch.Tensor:
    """What the GPU has of the first layer's input."""
    y, total = memory.sent(*memory.stage(hidden, None, rows))
    assert y is None
    return total


def spoil(memory: StepMemory) -> None:
    """Change the rows in host memory, uncounted, so that a copy from there is found out."""
    memory._residual_host.data.fill_(torch.nan)


def test_rows_are_sent_while_others_are_looked_up(
    memory: StepMemory, table: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, there = torch.randint(VOCABULARY, (40,)), memory._residual[: 40 * HIDDEN]
    there.fill_(torch.nan)
    select, rows_there = torch.index_select, []

    def select_and_note(*given: Any, **more: Any) -> torch.Tensor:
        rows_there.append(int((~there.view(40, HIDDEN).isnan()).all(dim=1).sum()))
        return select(*given, **more)

    monkeypatch.setattr(torch, "index_select", select_and_note)
    memory.embedded(table, tokens, STREAM)
    assert rows_there == [0, 16, 32]
    assert torch.equal(there.view(40, HIDDEN), table[tokens])


@pytest.mark.parametrize("rows", [slice(None), slice(0, 40), slice(7, 33)], ids=str)
def test_rows_are_sent_once(memory: StepMemory, table: torch.Tensor, rows: slice) -> None:
    tokens = torch.randint(VOCABULARY, (40,))
    hidden = memory.embedded(table, tokens, STREAM)
    assert hidden is not None
    spoil(memory)
    total = sent(memory, hidden, rows)
    assert torch.equal(total, table[tokens][rows])
    # The layers have added to it.
    total += 1
    assert sent(memory, hidden, rows).isnan().all()


def test_some_rows_are_sent_again(
    memory: StepMemory, table: torch.Tensor, copied: list[int]
) -> None:
    tokens, rows = torch.randint(VOCABULARY, (40,)), torch.tensor([3, 4, 20, 39])
    hidden = memory.embedded(table, tokens, STREAM)
    assert hidden is not None
    assert torch.equal(sent(memory, hidden, rows), table[tokens[rows]])
    # They lie where all did.
    assert torch.equal(sent(memory, hidden), table[tokens])
    assert copied == [4]


def double(x: torch.Tensor) -> None:
    x *= 2


def double_some(x: torch.Tensor) -> None:
    x[17:20] *= 2


def double_in_another_form(x: torch.Tensor) -> None:
    x.detach().view(-1, 2).unsqueeze(0).mul_(2)


def put(x: torch.Tensor) -> None:
    x[torch.tensor([2, 30])] = 5.0


def put_masked(x: torch.Tensor) -> None:
    x.masked_fill_(torch.arange(len(x)).unsqueeze(1) == 38, 5.0)


CHANGES = [double, double_some, double_in_another_form, put, put_masked]


@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_rows_are_sent_again(
    change: Callable[[torch.Tensor], None], is_counted: bool, memory: StepMemory,
    table: torch.Tensor, sent_before: list[int],
) -> None:  # fmt: skip
    with torch.inference_mode():
        if not is_counted:
            memory = StepMemory(CPU, 64, inputs=HIDDEN, outputs=HIDDEN, hidden=HIDDEN)
        tokens = torch.randint(VOCABULARY, (40,))
        hidden = memory.embedded(table, tokens, STREAM)
        assert hidden is not None
        expected = table[tokens].clone()
        assert torch.equal(hidden, expected)
        for one in (hidden, expected):
            change(one)
        assert torch.equal(sent(memory, hidden), expected)
        assert sent_before == []
        # The next ones are not changed.
        again = memory.embedded(table, tokens, STREAM)
        assert again is not None
        assert torch.equal(sent(memory, again), table[tokens])
        assert sent_before == [40] * is_counted


def test_other_tensors_are_sent(memory: StepMemory, table: torch.Tensor) -> None:
    tokens = torch.randint(VOCABULARY, (40,))
    hidden = memory.embedded(table, tokens, STREAM)
    assert hidden is not None
    assert torch.equal(sent(memory, hidden * 2), table[tokens] * 2)
    hidden = memory.embedded(table, tokens, STREAM)
    assert hidden is not None
    assert torch.equal(sent(memory, hidden[:, 1:]), table[tokens][:, 1:])


def test_what_was_looked_up_last_is_valid(memory: StepMemory, table: torch.Tensor) -> None:
    for count, other_stream in ((40, STREAM), (20, STREAM), (40, None), (20, None)):
        unused, tokens = torch.randint(VOCABULARY, (2, count))
        memory.embedded(table, unused, STREAM)
        hidden = memory.embedded(table, tokens, other_stream)
        assert hidden is not None
        assert torch.equal(sent(memory, hidden), table[tokens])
    # Of fewer tokens, all that is there of an earlier step is not theirs.
    longer = memory.embedded(table, torch.randint(VOCABULARY, (40,)), STREAM)
    assert longer is not None
    memory.embedded(table, torch.randint(VOCABULARY, (20,)), STREAM)
    memory._residual[20 * HIDDEN :].fill_(torch.nan)
    assert torch.equal(sent(memory, longer), longer)


@pytest.mark.parametrize("kind", ["layers", "product"])
def test_memory_that_was_used_in_between(
    kind: str, memory: StepMemory, table: torch.Tensor
) -> None:
    tokens, used = torch.randint(VOCABULARY, (40,)), torch.randn(16, HIDDEN).bfloat16()
    hidden = memory.embedded(table, tokens, STREAM)
    assert hidden is not None
    send = memory.sent if kind == "layers" else memory.sent_to_multiply
    _, total = send(used, used)
    assert total is not None
    assert torch.equal(total, used)
    assert torch.equal(sent(memory, hidden), table[tokens])


def test_a_failed_copy_is_made_again(
    memory: StepMemory, table: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(VOCABULARY, (40,))
    hidden = memory.embedded(table, tokens, STREAM)
    assert hidden is not None
    copy_, copies = torch.Tensor.copy_, [0]

    def copy_once(self: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        copies[0] += 1
        if copies[0] > 1:
            raise RuntimeError("CUDA error")
        return copy_(self, *given, **more)

    other = tokens.flip(0)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", copy_once)
        with pytest.raises(RuntimeError, match="CUDA error"):
            memory.embedded(table, other, STREAM)
    torch.index_select(table, 0, other, out=hidden)
    assert torch.equal(sent(memory, hidden), table[other])

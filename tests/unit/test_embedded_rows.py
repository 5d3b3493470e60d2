"""Rows of an embedding that only a GPU reads are looked up by it alone; it is the CPU here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from embeddings import VOCABULARY, EmbeddedSteps, embedding, model_of  # noqa: E402
from group_steps import GroupSteps  # noqa: E402
from native_module import needs_native  # noqa: E402
from vllm.model_executor.layers.vocab_parallel_embedding import (  # noqa: E402
    UnquantizedEmbeddingMethod,
)
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.kernels.prompts import gpu_prefill  # noqa: E402
from ray_hetero.kernels.prompts.embedded_prompts import look_up_for  # noqa: E402
from ray_hetero.kernels.prompts.embedded_rows import EmbeddedRows  # noqa: E402
from ray_hetero.kernels.prompts.gpu_table import GpuTable  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native
LARGE = 192
"""Tokens of a step that cannot be a decode step; whole blocks, of which vLLM's kernel reads all."""


@pytest.fixture(autouse=True)
def _small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(gpu_prefill, "LEAST_BYTES", 1)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> EmbeddedSteps:
    """An engine whose first step has shown that the layers get rows as they are."""
    made = EmbeddedSteps.made(monkeypatch)
    made.steps.check((made.request(LARGE), 0, LARGE))
    assert not made.is_left
    return made


def test_a_prompt_alone_is_not_looked_up_in_host_memory(engine: EmbeddedSteps) -> None:
    one, other = engine.request(500), engine.request(300)
    for parts in (((one, 0, 250),), ((one, 250, 480), (other, 0, 240))):
        engine.steps.check(*parts)
        assert engine.is_left
    # A prompt with a cached beginning, and decode steps, which have rows of their own.
    engine.steps.check((one, 480, 481), (other, 240, 241))
    engine.steps.check((other, 241, 300))
    engine.steps.check((engine.request(LARGE), 0, LARGE))
    assert engine.is_left


def test_rows_that_are_expected_are_looked_up_once(
    engine: EmbeddedSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[list[int]] = []
    look_up = GpuTable.__call__

    def note(self: GpuTable, tokens: torch.Tensor, into: torch.Tensor) -> None:
        looked_up.append(tokens.tolist())
        look_up(self, tokens, into)

    monkeypatch.setattr(GpuTable, "__call__", note)
    gpu = engine.steps.made.gpu
    assert gpu is not None
    one = engine.request(1000)
    tokens = engine.tokens[one]

    def step(begin: int, expected: torch.Tensor | None) -> list[list[int]]:
        looked_up.clear()
        if expected is not None:
            engine.rows.expect(expected, gpu.computing)
        engine.steps.check((one, begin, begin + LARGE))
        assert engine.is_left
        return looked_up

    assert step(0, tokens[:LARGE]) == [tokens[:LARGE].tolist()]
    second, third, fourth = (tokens[n * LARGE : (n + 1) * LARGE] for n in (1, 2, 3))
    # Others than those, none, or more than there is room for.
    assert step(LARGE, third) == [third.tolist(), second.tolist()]
    assert step(2 * LARGE, torch.tensor([VOCABULARY])) == [third.tolist()]
    many = torch.zeros(engine.rows._memory.numel() // engine.layer.weight.shape[1] + 1).long()
    assert step(3 * LARGE, many) == [fourth.tolist()]
    # What came before a step that did not look for it is not there any more.
    engine.rows.expect(fourth, gpu.computing)
    engine.steps.check((one, 4 * LARGE, 4 * LARGE + 1))
    two = engine.request(LARGE)
    engine.tokens[two] = fourth
    two.inputs.copy_(engine.layer.weight[fourth])
    looked_up.clear()
    engine.steps.check((two, 0, LARGE))
    assert looked_up == [fourth.tolist()]


def test_rows_that_the_cores_decode_are_looked_up(engine: EmbeddedSteps) -> None:
    one, other = engine.request(300), engine.request(300)
    engine.steps.check((one, 0, 250))
    engine.steps.check((one, 250, 251), (other, 0, 240))
    assert not engine.is_left
    engine.steps.check((other, 240, 290), (one, 251, 252))
    assert not engine.is_left
    # A step of as many rows as a prompt's, all of which decode.
    many = [engine.request(40) for _ in range(10)]
    engine.steps.check(*((request, 0, 39) for request in many))
    assert engine.is_left
    engine.steps.check(*((request, 39, 40) for request in many))
    assert not engine.is_left


def test_a_gpu_without_memory_leaves_them_to_the_cores(
    engine: EmbeddedSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = engine.steps.made.gpu
    assert gpu is not None

    def fail(*given: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(gpu.memory, "sent", fail)
    request = engine.request(LARGE)
    engine.steps.check((request, 0, LARGE))
    assert not engine.is_left
    assert engine.steps.made.gpu is None


def test_a_gpu_that_has_forgotten_them_is_sent_them(
    engine: EmbeddedSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.rows, "take", lambda rows: None)
    engine.steps.check((engine.request(LARGE), 0, LARGE))
    assert not engine.is_left


def test_a_busy_stream_has_the_cores_look_up(engine: EmbeddedSteps) -> None:
    found = engine.rows(engine.layer.weight, torch.arange(LARGE), None)
    assert torch.equal(found, engine.layer.weight[:LARGE])


def test_tokens_of_no_row_are_refused(engine: EmbeddedSteps) -> None:
    for token in (VOCABULARY, -VOCABULARY - 1):
        tokens = torch.full((LARGE,), token)
        with pytest.raises(IndexError):
            engine.layer(tokens)


def in_place(rows: torch.Tensor) -> torch.Tensor:
    return rows.mul_(8)


def out_of_place(rows: torch.Tensor) -> torch.Tensor:
    return rows * 8


@pytest.mark.parametrize("change", [in_place, out_of_place])
def test_models_that_change_rows_have_them_all(
    change: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = EmbeddedSteps.made(monkeypatch)
    made.change = change
    for _ in range(3):
        made.steps.check((made.request(LARGE, factor=8), 0, LARGE))
        assert not made.is_left


@pytest.mark.parametrize("change", [in_place, out_of_place])
def test_a_model_that_changes_rows_later_is_an_error(
    change: Callable[[torch.Tensor], torch.Tensor], engine: EmbeddedSteps
) -> None:
    engine.change = change
    with pytest.raises(RuntimeError, match=r"changed before its layers got them.*prefill_on_gpu"):
        engine.steps.check((engine.request(LARGE, factor=8), 0, LARGE))


def test_where_layers_may_get_other_rows_all_are_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = EmbeddedSteps.made(monkeypatch, takes_tokens_only=False)
    for _ in range(3):
        made.steps.check((made.request(LARGE), 0, LARGE))
        assert not made.is_left


def test_ranks_of_a_group_leave_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, layer = GroupSteps(monkeypatch, count=2, most=512), embedding()
    found = []
    for rank, (group, *_) in zip(steps.ranks, steps.join(), strict=True):
        own = embedding()
        own.weight, own.quant_method = layer.weight, UnquantizedEmbeddingMethod()
        rows = look_up_for(group, model_of(own), takes_tokens_only=True)
        assert rows is not None
        rank.made.embedded = rows
        found.append((own, rows))
    one, other = steps.request(320), steps.request(300)
    tokens = {
        request: torch.randint(VOCABULARY, (len(request.inputs),)) for request in (one, other)
    }
    for request, asked in tokens.items():
        request.inputs.copy_(layer.weight[asked])

    def check(*parts: Any) -> list[bool]:
        """Compute a step; whether each rank has left the rows to others."""
        asked = torch.cat([tokens[request][begin:end] for request, begin, end in parts])
        with monkeypatch.context() as patched:
            for rank, (own, rows) in zip(steps.ranks, found, strict=True):

                def embedded(
                    positions: Any, hidden: Any, residual: Any, made: Any = rank.made,
                    own: Any = own, rows: EmbeddedRows = rows,
                ) -> Any:  # fmt: skip
                    rows._memory.data.fill_(torch.nan)
                    return made(positions, own(asked), residual)

                patched.setattr(rank, "made", embedded)
            steps.check(*parts)
        return [bool(rows._memory.isnan().all()) for _, rows in found]

    assert check((one, 0, LARGE)) == [False, False]
    assert check((one, LARGE, 310), (other, 0, 100)) == [True, True]
    # A request decodes beside a prompt.
    assert check((one, 310, 311), (other, 100, 290)) == [False, False]

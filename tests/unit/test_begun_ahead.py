"""The GPU, which is the CPU here, begins with new prompts before their step reaches the layers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from native_module import needs_native  # noqa: E402
from paged_steps import Conversation  # noqa: E402
from scheduled_steps import LARGE, Engine, GroupEngine  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.kernels.layers.step_rows import DECODING_TOKENS, PROMPT_TOKENS  # noqa: E402
from ray_hetero.kernels.prompts import (  # noqa: E402
    gpu_layers,
    gpu_post_attention,
    gpu_step,
    prompts_ahead,
)
from ray_hetero.kernels.prompts.gpu_prefill import GpuPrefill  # noqa: E402
from ray_hetero.kernels.prompts.gpu_table import GpuTable  # noqa: E402

current_platform.import_kernels()
pytestmark = [needs_native, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(prompts_ahead, "READING_TOKENS", 30)
    yield
    prompts_ahead.use([])


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def is_begun(engine: Engine) -> bool:
    """Whether the GPU has begun with a step that nobody has asked for yet."""
    return engine.gpu.abandon is not None


@pytest.mark.parametrize("tokens", [40, LARGE])
def test_a_new_prompt_is_begun_with_when_it_is_scheduled(tokens: int, engine: Engine) -> None:
    request, other = engine.request(tokens + 30), engine.request(60)
    engine.schedule((request, 0, tokens))
    assert is_begun(engine)
    assert not engine.gpu.is_settled
    assert engine.compute((request, 0, tokens)) == ["begun", "called"]
    assert not is_begun(engine)
    # Its next chunk needs what is cached, and is begun with when it is asked for.
    assert engine.step((request, tokens, tokens + 29)) == ["begun", "called"]
    engine.schedule((other, 0, 59))
    engine.compute((other, 0, 59))
    # All keys and values are where decoding needs them.
    engine.compute((request, tokens + 29, tokens + 30), (other, 59, 60))


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each layer behind its attention, in the order in which the GPU gets them."""
    found: list[int] = []
    behind = gpu_post_attention.behind

    def slow(gpu: Any, parts: Any, attended: Any, total: Any) -> Any:
        time.sleep(0.2)
        found.append(len(attended))
        return behind(gpu, parts, attended, total)

    monkeypatch.setattr(gpu_post_attention, "behind", slow)
    monkeypatch.setattr(gpu_layers, "FIRST_LAYER_S", 60)
    return found


def test_the_step_is_prepared_once_the_gpu_has_a_layer_to_compute(
    engine: Engine, ordered: list[int]
) -> None:
    request = engine.request(LARGE)
    engine.schedule((request, 0, LARGE))
    assert ordered == [LARGE]
    engine.compute((request, 0, LARGE))


def test_the_step_is_prepared_while_the_gpu_waits_for_its_turn(
    engine: Engine, ordered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_turn = threading.Event()
    monkeypatch.setattr(engine.sent.output, "has_turn", lambda tokens: has_turn.is_set())
    request = engine.request(LARGE)
    engine.schedule((request, 0, LARGE))
    assert is_begun(engine)
    assert not ordered
    has_turn.set()
    engine.compute((request, 0, LARGE))


def test_prompts_of_one_step_and_a_first_chunk(engine: Engine) -> None:
    requests = [engine.request(tokens) for tokens in (70, 300, 30)]
    parts = [(request, 0, 60 if place else 69) for place, request in enumerate(requests[:2])]
    engine.schedule(*parts)
    assert is_begun(engine)
    assert engine.compute(*parts) == ["begun", "called"]
    engine.compute((requests[0], 69, 70), (requests[1], 60, 200))


def others(engine: Engine, request: Conversation) -> None:
    """Let the step have other tokens than those that were scheduled."""
    engine.embedded.tokens[request] = engine.embedded.tokens[request].flip(0)
    request.inputs.copy_(engine.embedded.layer.weight[engine.embedded.tokens[request]])


def test_other_tokens_than_expected_are_computed_anew(engine: Engine) -> None:
    request = engine.request(LARGE + 1)
    engine.schedule((request, 0, LARGE))
    others(engine, request)
    assert engine.compute((request, 0, LARGE)) == ["begun", "begun", "called"]
    assert not is_begun(engine)
    engine.compute((request, LARGE, LARGE + 1))


def test_the_same_tokens_at_other_positions_are_computed_anew(engine: Engine) -> None:
    request = engine.request(2 * LARGE)
    tokens = engine.embedded.tokens[request]
    tokens[LARGE:] = tokens[:LARGE]
    request.inputs.copy_(engine.embedded.layer.weight[tokens])
    engine.step((request, 0, LARGE))
    engine.schedule((request, 0, LARGE))
    assert engine.compute((request, LARGE, 2 * LARGE)) == ["begun", "begun", "called"]
    engine.step((engine.request(100), 0, 100))


def test_results_that_are_asked_for_elsewhere_are_computed_anew(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = engine.request(LARGE)
    engine.schedule((request, 0, LARGE))
    with monkeypatch.context() as patched:
        patched.setattr(engine.sent.output, "may_take", lambda tokens: False)
        assert engine.compute((request, 0, LARGE)) == ["begun", "begun", "called"]
        engine.schedule((request, 0, LARGE))
        assert not is_begun(engine)
    assert engine.step((engine.request(100), 0, 100)) == ["begun", "called"]


def test_a_step_that_does_not_come_leaves_nothing(engine: Engine) -> None:
    first, second = engine.request(101), engine.request(LARGE)
    engine.step((first, 0, 100))
    engine.schedule((second, 0, LARGE))
    # Nothing else is begun meanwhile, and what would come ahead is not asked for.
    engine.schedule((second, 0, LARGE))
    engine.gpu.read_ahead()
    assert is_begun(engine)
    engine.compute((first, 100, 101))
    engine.gpu.settle()
    assert not is_begun(engine)
    assert engine.gpu.is_settled
    assert engine.step((second, 0, LARGE)) == ["begun", "called"]


def test_a_prompt_that_is_read_for_longer_begins_when_it_is_called(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts_ahead, "READING_TOKENS", 100)
    asked: list[int] = []
    monkeypatch.setattr(engine.gpu, "read_ahead", lambda: asked.append(1))
    request, other = engine.request(100), engine.request(101)
    engine.schedule((request, 0, 100))
    assert asked
    assert not is_begun(engine)
    engine.compute((request, 0, 100))
    asked.clear()
    engine.schedule((other, 0, 101))
    assert not asked
    assert is_begun(engine)
    engine.compute((other, 0, 101))


@pytest.mark.parametrize("parts", [[(0, 8)], [(0, 100), (0, 8)], [(64, 150)]])
def test_what_is_cached_or_may_be_decoded_is_not_begun_with(
    parts: Sequence[tuple[int, int]], engine: Engine
) -> None:
    engine.schedule(*((engine.request(200), begin, end) for begin, end in parts))
    assert not is_begun(engine)


@pytest.mark.parametrize("has_others", [False, True])
def test_a_gpu_that_runs_out_of_memory_leaves_the_step_to_the_cores(
    has_others: bool, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any, **more: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    request = engine.request(LARGE + 1)
    with monkeypatch.context() as patched:
        patched.setattr(gpu_step, "attend", fail)
        engine.schedule((request, 0, LARGE))
        if has_others:
            others(engine, request)
        assert engine.compute((request, 0, LARGE)) == ["begun", "called"]
    assert engine.layers.gpu is None
    engine.schedule((engine.request(LARGE), 0, LARGE))
    assert not is_begun(engine)
    engine.compute((request, LARGE, LARGE + 1))


def test_the_first_rank_of_a_group_begins_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = GroupEngine(monkeypatch)
    long, other = engine.request(LARGE + 1), engine.request(100)
    engine.begins.clear()
    assert engine.step((long, 0, LARGE)) == ["begun", "called"]
    assert engine.begins == [True]
    engine.step((other, 0, 99))
    assert engine.step((long, LARGE, LARGE + 1), (other, 99, 100)) == ["called"]
    assert not engine.group.ranks[1].made.begin_ahead([LARGE])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("least", [PROMPT_TOKENS, DECODING_TOKENS + 1])
@pytest.mark.parametrize("kind", [Engine, GroupEngine])
def test_short_prompts_that_the_cores_compute_leave_nothing(
    kind: type[Engine | GroupEngine], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = kind(monkeypatch, layers=3)
    # With another idea of prompts than the layers have, the GPU begins with them.
    monkeypatch.setattr(prompts_ahead, "PROMPT_TOKENS", least)
    parts = [(engine.request(PROMPT_TOKENS - 1), 0, PROMPT_TOKENS - 1) for _ in range(4)]
    assert sum(end for *_, end in parts) > prompts_ahead.READING_TOKENS
    engine.schedule(*parts)
    assert (engine.gpu.abandon is not None) == (least < PROMPT_TOKENS)
    engine.compute(*parts)
    assert engine.gpu.abandon is None
    assert engine.gpu.is_settled
    assert engine.step((engine.request(LARGE), 0, LARGE)) == ["begun", "called"]


def failing_expansion(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Have the GPU's memory run out where weights are expanded ahead for this time; each time."""
    expand, calls = GpuPrefill.expand, []

    def expand_or_fail(gpu: GpuPrefill, linears: Any) -> None:
        calls.append(len(calls))
        if calls[-1] == number:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        expand(gpu, linears)

    monkeypatch.setattr(GpuPrefill, "expand", expand_or_fail)
    return calls


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("behind", ["a new prompt", "a decode step"])
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("kind", [Engine, GroupEngine])
def test_memory_that_runs_out_ahead_of_a_step_is_its_cores_work(
    kind: type[Engine | GroupEngine], number: int, behind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = kind(monkeypatch, layers=3, share=0.67)
    request, tokens = engine.request(LARGE + 4), LARGE
    engine.step((request, 0, tokens))
    with monkeypatch.context() as patched:
        calls = failing_expansion(patched, number)
        for _ in range(2):
            engine.schedule((request, tokens, tokens + 1), known=1)
            engine.compute((request, tokens, tokens + 1))
            tokens += 1
            if number in calls:
                break
        # The thread orders the first layer of the next step behind this one.
        engine.gpu.order(lambda: None).result(60)
        assert number in calls
    if behind == "a new prompt":
        engine.step((engine.request(LARGE), 0, LARGE))
    engine.schedule((request, tokens, tokens + 1), known=1)
    engine.compute((request, tokens, tokens + 1))
    engine.step((engine.request(LARGE), 0, LARGE))
    engine.gpu.settle()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("owner", "name"),
    [(GpuTable, "__call__"), (GpuPrefill, "read_first"), (gpu_step, "attend")],
    ids=["rows of the embedding", "first weights", "attention"],
)
@pytest.mark.parametrize("kind", [Engine, GroupEngine])
def test_memory_that_runs_out_before_the_layers_is_the_cores_work(
    kind: type[Engine | GroupEngine], owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM's own attention multiplies what nobody has written with 0.
    engine, failed = kind(monkeypatch, layers=3, unwritten=0.0), []

    def fail(*given: Any, **more: Any) -> Any:
        failed.append(name)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    short = prompts_ahead.READING_TOKENS - 1
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fail)
        for tokens in (short, LARGE):
            engine.step((engine.request(tokens), 0, tokens))
    assert failed
    engine.step((engine.request(LARGE), 0, LARGE))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", [Engine, GroupEngine])
def test_requests_decode_beside_prompts_that_the_gpu_has_no_memory_for(
    kind: type[Engine | GroupEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM's own attention multiplies what nobody has written with 0.
    engine = kind(monkeypatch, layers=3, unwritten=0.0)
    request = engine.request(42)
    engine.step((request, 0, 40))
    engine.schedule((request, 40, 41), (other := engine.request(LARGE), 0, LARGE), known=1)
    with engine.gpu.leaving_shortage():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    # The other ranks decode theirs, and wait for the first one meanwhile.
    engine.compute((request, 40, 41), (other, 0, LARGE))
    engine.schedule((request, 41, 42), known=1)
    engine.compute((request, 41, 42))

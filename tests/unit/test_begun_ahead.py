"""The GPU, which is the CPU here, begins with new prompts before their step reaches the layers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from embeddings import EmbeddedSteps, embedding, model_of  # noqa: E402
from group_steps import GroupSteps  # noqa: E402
from native_module import needs_native  # noqa: E402
from paged_steps import Conversation  # noqa: E402
from stage_outputs import offered, pretended_memory, results  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput  # noqa: E402

from ray_hetero.kernels.prompts import (  # noqa: E402
    gpu_layers,
    gpu_post_attention,
    gpu_step,
    kv_transfer,
    prompts_ahead,
)
from ray_hetero.kernels.prompts.embedded_prompts import look_up_for  # noqa: E402
from ray_hetero.kernels.prompts.gpu_step import GpuStep  # noqa: E402
from ray_hetero.kernels.prompts.prompts_ahead import PromptsAhead  # noqa: E402

current_platform.import_kernels()
pytestmark = [needs_native, pytest.mark.timeout(120)]
LARGE = 192
"""Tokens of a step that cannot be a decode step."""
Part = tuple[Conversation, int, int]


class SentSteps:
    """Steps whose results stay on the GPU, and the next stage, which reads them there.

    Args:
        monkeypatch: notes each step that the GPU begins with.
        layers: of the first rank, whose results are sent.

    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layers: Any) -> None:
        self.output, self._seen = offered(layers, waits=True)
        self.done: list[str] = []
        compute = GpuStep.compute

        def compute_and_note(step: GpuStep, *given: Any) -> Any:
            self.done.append("begun")
            return compute(step, *given)

        monkeypatch.setattr(GpuStep, "compute", compute_and_note)

    def results(self, x: Any, total: Any) -> tuple[Any, Any]:
        """Both results of a step, wherever they are, once nothing of it is left to do.

        Args:
            x: what the layers return, [tokens, N].
            total: the same.

        """
        self.done.append("called")
        if self.output.holds({"hidden_states": x, "residual": total}):
            words, number = self._seen.words, self.output.number
            assert words is not None
            self.output.settle()
            words.wait(number)
            x, total = (one.clone() for one in results(self._seen, len(x)))
            words.say(number)
        return x, total


def scheduled(tokens: dict[Conversation, torch.Tensor], *parts: Part) -> SchedulerOutput:
    """A step of vLLM's scheduler, in which each request is a new one."""
    made = SchedulerOutput.make_empty()
    names = [str(number) for number in range(len(parts))]
    made.num_scheduled_tokens = {
        name: end - begin for name, (_, begin, end) in zip(names, parts, strict=True)
    }
    made.total_num_scheduled_tokens = sum(made.num_scheduled_tokens.values())
    made.scheduled_new_reqs = [
        NewRequestData(
            name, tokens[request].tolist(), [], SamplingParams(), None, ([],), begin, None
        )
        for name, (request, begin, _) in zip(names, parts, strict=True)
    ]
    return made


class Engine:
    """Steps of one rank that vLLM schedules, looks up and has computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pretended_memory(monkeypatch)
        # The next layer's keys and values wait until those of the one before are written.
        monkeypatch.setattr(kv_transfer, "HOST_BUFFERS", 1)
        self.embedded = EmbeddedSteps.made(monkeypatch)
        self.steps, self.layers = self.embedded.steps, self.embedded.steps.made
        self.gpu = self.layers.gpu
        self.sent = SentSteps(monkeypatch, self.layers)
        prompts_ahead.use([self.steps.kernel.prompts], self.layers.begin_ahead)
        self._ahead = PromptsAhead()
        # What the model does with rows, and what is sent, is known after two steps.
        for _ in range(2):
            request = self.request(LARGE)
            self.step((request, 0, LARGE))

    def request(self, tokens: int) -> Conversation:
        return self.embedded.request(tokens)

    def schedule(self, *parts: Part) -> None:
        self._ahead.begin_step(scheduled(self.embedded.tokens, *parts))

    def compute(self, *parts: Part) -> list[str]:
        """Compute a step, and compare it; what was done since the last one, in its order."""
        positions, hidden = self.steps.begin(parts)
        self.steps.compare(*self.sent.results(*self.layers(positions, hidden, None)), parts)
        done = list(self.sent.done)
        self.sent.done.clear()
        return done

    def step(self, *parts: Part) -> list[str]:
        self.schedule(*parts)
        return self.compute(*parts)


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
    pretended_memory(monkeypatch)
    group, layer = GroupSteps(monkeypatch, count=2, most=512), embedding()
    tokens: dict[Conversation, torch.Tensor] = {}
    tables = []
    for rank, (prompts, *_) in zip(group.ranks, group.join(), strict=True):
        own = embedding()
        own.weight = layer.weight
        rank.made.embedded = look_up_for(prompts, model_of(own), takes_tokens_only=True)
        tables.append(own)
    first = group.ranks[0].made
    sent = SentSteps(monkeypatch, first)
    prompts_ahead.use([first._many], first.begin_ahead)
    ahead = PromptsAhead()

    def request(count: int) -> Conversation:
        made = group.request(count)
        tokens[made] = torch.randint(len(layer.weight), (count,))
        made.inputs.copy_(layer.weight[tokens[made]])
        return made

    def step(*parts: Part) -> list[str]:
        sent.done.clear()
        ahead.begin_step(scheduled(tokens, *parts))
        asked = torch.cat([tokens[one][begin:end] for one, begin, end in parts])
        found: list[tuple[Any, Any]] = []
        with monkeypatch.context() as patched:
            for place, (rank, table) in enumerate(zip(group.ranks, tables, strict=True)):

                def call(
                    positions: Any, hidden: Any, residual: Any, made: Any = rank.made,
                    table: Any = table, is_first: bool = not place,
                ) -> Any:  # fmt: skip
                    x, total = made(positions, table(asked), residual)
                    if is_first:
                        found.append(sent.results(x, total))
                    return x, total

                patched.setattr(rank, "made", call)
            for one in group.step(*parts):
                if isinstance(one, Exception):
                    raise one
        group.compare(*found[0], parts)
        return sent.done

    for _ in range(2):
        step((request(LARGE), 0, LARGE))
    long, other = request(LARGE + 1), request(100)
    begins: list[bool] = []
    begin = first.begin_ahead
    prompts_ahead.use([first._many], lambda counts: begins.append(begin(counts)) or begins[-1])
    assert step((long, 0, LARGE)) == ["begun", "called"]
    assert begins == [True]
    step((other, 0, 99))
    assert step((long, LARGE, LARGE + 1), (other, 99, 100)) == ["called"]
    assert not group.ranks[1].made.begin_ahead([LARGE])

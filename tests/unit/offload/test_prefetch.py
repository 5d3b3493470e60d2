"""What a prompt needs first is on its way to the GPU before its step reaches the layers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from copied_pieces import CopiedPieces, small_pieces  # noqa: E402
from native_module import needs_native  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput  # noqa: E402

from ray_hetero.kernels.step_route import StepLimits, StepRoute  # noqa: E402
from ray_hetero.offload.prefetch import Prefetcher  # noqa: E402
from ray_hetero.offload.weights import piece_reader  # noqa: E402
from ray_hetero.offload.weights.weight_pieces import Piece  # noqa: E402
from ray_hetero.planning.prefill_memory import EXPANDED, SLOTS  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native

PROMPT = 150
FROM_TOKENS = 64
PROMPT_TOKENS = list(range(1000, 9000))
DECODES = SamplingParams()
"""What a request asks for that decodes behind its prompt."""
CACHED = 100
"""Tokens of a new request whose keys and values are cached."""


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    monkeypatch.setattr(piece_reader, "slots_within", lambda *sizes: SLOTS)


def step(
    counts: dict[str, int], new: Sequence[str] = (), finished: Sequence[str] = (),
    asked: SamplingParams | None = DECODES,
) -> SchedulerOutput:  # fmt: skip
    """A step of so many tokens of each request."""
    made = SchedulerOutput.make_empty()
    made.num_scheduled_tokens = counts
    made.total_num_scheduled_tokens = sum(counts.values())
    made.scheduled_new_reqs = [
        NewRequestData(name, PROMPT_TOKENS, [], asked, None, ([],), CACHED, None) for name in new
    ]
    made.finished_req_ids = set(finished)
    return made


class Gpu:
    """Notes what it is asked for."""

    computing = "the stream of products"

    def __init__(self) -> None:
        self.asked = 0

    def read_ahead(self) -> None:
        self.asked += 1

    def leaving_shortage(self) -> AbstractContextManager[None]:
        return nullcontext()


def begin_ahead(ahead: Prefetcher, one: SchedulerOutput) -> None:
    """Begin a step of a rank with a GPU."""
    limits = StepLimits(128, FROM_TOKENS, 8192, has_products=True)
    ahead.begin_step(one, StepRoute.of(one.num_scheduled_tokens.values(), limits))


class Layers:
    """Layers with a part for the GPU in decode steps of up to three tokens.

    Args:
        fetched: tokens of the steps that weights were asked for, noted.

    """

    def __init__(self, fetched: list[int] | None = None) -> None:
        self._fetched = [] if fetched is None else fetched

    def fetch_ahead(self, tokens: int) -> None:
        self._fetched.append(tokens)


def test_a_step_of_prompts_and_an_engine_without_requests_ask_for_weights() -> None:
    gpu: Any = Gpu()
    ahead, without = Prefetcher(gpu), Prefetcher(None)
    steps = [
        (step({"a": FROM_TOKENS}, new="a"), 1),
        (step({"a": 1}), 0),
        # What decodes does not count, nor do drafts that are verified.
        (step({"a": 5, "b": FROM_TOKENS - 1}, new="b"), 0),
        (step({"a": 1, "b": 8, "c": 4096}, new="c"), 1),
        (step({"c": 1}, finished="a"), 0),
        (step({}, finished="b"), 0),
        # Nothing is left to decode: a prompt comes next.
        (step({}, finished="c"), 1),
        # A request of the same name as one that has ended.
        (step({"c": 1}, new="c", finished="c"), 0),
    ]
    for number, (one, expected) in enumerate(steps):
        before = gpu.asked
        begin_ahead(ahead, one)
        begin_ahead(without, one)
        assert gpu.asked - before == expected, number


def test_weights_come_for_a_step_that_only_decodes() -> None:
    gpu: Any = Gpu()
    fetched: list[int] = []
    ahead = Prefetcher(gpu, Layers(fetched))
    steps: list[tuple[SchedulerOutput, list[int]]] = [
        (step({"a": FROM_TOKENS, "b": 5}, new="ab"), []),
        (step({"a": 1, "b": 1}), [2]),
        # Drafts are verified.
        (step({"a": 4, "b": 1}), [5]),
        (step({"a": 1, "b": 1, "c": FROM_TOKENS}, new="c"), []),
        # Few enough tokens to be decoded, but of a prompt that has to come.
        (step({"a": 1, "d": 3}, new="d"), []),
        (step({}, finished="abcd"), []),
    ]
    for number, (one, expected) in enumerate(steps, 1):
        fetched.clear()
        begin_ahead(ahead, one)
        assert fetched == expected, number


def test_the_next_prompt_finds_its_first_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = CopiedPieces(monkeypatch, 1000, most=512, columns=12)
    gpu = copies.steps.made.gpu
    assert gpu is not None
    ahead = Prefetcher(gpu)

    def asked_for() -> list[Piece]:
        with copies.traced():
            begin_ahead(ahead, step({}))
        return copies.copied

    for tokens in (PROMPT, PROMPT, 1, 1, 1):
        copies.of_step(tokens)
    came = asked_for()
    assert came
    assert asked_for() == []
    found = copies.of_step(PROMPT)
    # At its end comes what the prompt behind it begins with, of which some is expanded.
    expanded = EXPANDED - 1
    rest, begin = found[: -SLOTS - expanded], found[-SLOTS - expanded :]
    assert came in (begin, begin[expanded:])
    assert not set(rest) & set(begin)
    # Right, whatever has come in between, and where nothing uses what has come.
    for tokens in (1, 1):
        copies.of_step(tokens)
    asked_for()
    for tokens in (1, 40, 1, PROMPT):
        copies.of_step(tokens)


def test_before_the_first_prompt_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = CopiedPieces(monkeypatch, 1000, most=512, columns=12)
    gpu = copies.steps.made.gpu
    assert gpu is not None
    with copies.traced():
        gpu.read_ahead()
    assert not copies.copied
    copies.of_step(PROMPT)


def test_what_went_wrong_before_is_left_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = CopiedPieces(monkeypatch, 1000, most=512, columns=12)
    gpu = copies.steps.made.gpu
    assert gpu is not None
    for tokens in (PROMPT, PROMPT):
        copies.of_step(tokens)
    with gpu.leaving_shortage():
        raise torch.OutOfMemoryError("no memory")
    with copies.traced():
        gpu.read_ahead()
    assert not copies.copied
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        gpu.settle()
    copies.of_step(PROMPT)

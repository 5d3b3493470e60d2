"""Steps of more tokens while no request decodes: how many a step of vLLM's scheduler may take."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.config import SchedulerConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler

from ray_hetero.compat.engine.long_prompts import (
    CLASSES,
    AsyncLongPromptScheduler,
    LongPromptScheduler,
    make_room,
    schedule_long_prompts,
    steps_conflict,
)
from ray_hetero.compat.worker.late_tokens import SCHEDULER
from ray_hetero.errors import ConfigError
from ray_hetero.launch.prepare import prepare

LIMIT, ROOM = 64, 512


def request(**given: Any) -> Any:
    """Stand-in for a request, with the attributes that the scheduler reads."""
    asked = {
        "is_prefill_chunk": True, "sampling_params": SamplingParams(), "mm_features": (),
        "num_computed_tokens": 0,
    }  # fmt: skip
    return SimpleNamespace(**asked | given)


def item(offset: int, length: int) -> Any:
    return SimpleNamespace(mm_position=PlaceholderRange(offset=offset, length=length))


DECODING = request(is_prefill_chunk=False)
READING = request()
SCORED = request(sampling_params=SamplingParams(prompt_logprobs=1))
POOLED = request(sampling_params=None)


def config(**given: Any) -> SchedulerConfig:
    usual = {"max_num_seqs": 4, "max_num_batched_tokens": ROOM, "max_num_scheduled_tokens": LIMIT}
    return SchedulerConfig(max_model_len=64, is_encoder_decoder=False, **usual | given)


def limits(
    monkeypatch: pytest.MonkeyPatch, kind: Any, running: list[Any], waiting: list[Any], **given: Any
) -> list[int]:
    """Tokens that vLLM's scheduler may take in a step, and in the one behind it."""
    seen: list[int] = []
    monkeypatch.setattr(
        Scheduler, "schedule", lambda self, *_: seen.append(self.max_num_scheduled_tokens)
    )
    # Its own beginning wants the configuration of an engine.
    made = kind.__new__(kind)
    made.running, made.waiting = running, create_request_queue(SchedulingPolicy.FCFS)
    for one in waiting:
        made.waiting.add_request(one)
    made.max_num_scheduled_tokens, made.scheduler_config = LIMIT, config(**given)
    made.schedule(False)
    return [*seen, made.max_num_scheduled_tokens]


@pytest.mark.parametrize("kind", [LongPromptScheduler, AsyncLongPromptScheduler])
@pytest.mark.parametrize(
    ("running", "waiting", "most"),
    [
        ([], [READING], ROOM), ([READING] * 2, [POOLED], ROOM), ([DECODING], [READING], LIMIT),
        ([READING, DECODING], [], LIMIT),
        # Logits of a prompt take as much memory as its step has tokens.
        ([SCORED], [READING], LIMIT), ([READING], [READING, SCORED], LIMIT),
    ],
)  # fmt: skip
def test_steps_without_decoding_take_all_room(
    running: list[Any], waiting: list[Any], most: int, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert limits(monkeypatch, kind, running, waiting) == [most, LIMIT]


@pytest.mark.parametrize(
    ("running", "waiting", "most"),
    [
        ([DECODING], [request(mm_features=(item(3, LIMIT + 1),))], ROOM),
        ([DECODING, request(mm_features=(item(0, 8), item(9, ROOM)))], [], ROOM),
        ([DECODING], [request(mm_features=(item(3, LIMIT),))], LIMIT),
        ([DECODING], [READING, request(mm_features=(item(3, ROOM),))], LIMIT),
        ([request(is_prefill_chunk=False, mm_features=(item(3, ROOM),))], [], LIMIT),
        ([DECODING, request(mm_features=(item(3, 100),), num_computed_tokens=103)], [], LIMIT),
    ],
)
def test_an_image_that_is_taken_whole_does_not_wait_for_the_end_of_all_decoding(
    running: list[Any], waiting: list[Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = limits(monkeypatch, LongPromptScheduler, running, waiting, disable_chunked_mm_input=True)
    assert seen == [most, LIMIT]
    assert limits(monkeypatch, LongPromptScheduler, running, waiting) == [LIMIT, LIMIT]


def test_an_idle_engine_waits_for_as_many_tokens_as_its_step_may_have() -> None:
    made = LongPromptScheduler.__new__(LongPromptScheduler)
    made.scheduler_config = config()
    assert made.idle_step_tokens == ROOM


@pytest.mark.parametrize(
    ("given", "runner", "said"),
    [
        ({}, "generate", None),
        ({"max_num_seqs": 65}, "generate", r"up to 64 tokens .*fewer than .* \(65\)"),
        ({"enable_chunked_prefill": False}, "generate", r"up to 100 tokens .* up to 64\. Leave"),
        ({"enable_chunked_prefill": False}, "pooling", None),
        ({"enable_chunked_prefill": False, "max_num_scheduled_tokens": 100}, "generate", None),
    ],
)
def test_limits_that_some_request_could_never_keep(
    given: dict[str, Any], runner: str, said: str | None
) -> None:
    model = SimpleNamespace(max_model_len=100, runner_type=runner)
    found = steps_conflict(SimpleNamespace(scheduler_config=config(**given), model_config=model))
    assert (found is None) == (said is None)
    assert found is None or re.search(str(said), found)


def test_the_limit_is_as_it_was_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(Scheduler, "schedule", fail)
    made = LongPromptScheduler.__new__(LongPromptScheduler)
    made.running, made.waiting = [], []
    made.max_num_scheduled_tokens, made.scheduler_config = 64, config()
    with pytest.raises(RuntimeError):
        made.schedule()
    assert made.max_num_scheduled_tokens == 64


@pytest.mark.parametrize(
    ("given", "ahead", "chosen"),
    [
        (None, False, LongPromptScheduler),
        (None, True, AsyncLongPromptScheduler),
        (SCHEDULER, False, AsyncLongPromptScheduler),
    ],
)
def test_the_scheduler_stays_synchronous_or_not(given: Any, ahead: bool, chosen: Any) -> None:
    made = config(scheduler_cls=given, async_scheduling=ahead)
    assert schedule_long_prompts(SimpleNamespace(scheduler_config=made))
    assert made.get_scheduler_cls() is chosen
    assert issubclass(chosen, AsyncScheduler) == (ahead or given is not None)


@pytest.mark.parametrize("given", ["somebody.Scheduler", *CLASSES])
def test_a_scheduler_of_somebody_else_stays(given: str) -> None:
    made = config(scheduler_cls=given)
    assert not schedule_long_prompts(SimpleNamespace(scheduler_config=made))
    assert made.scheduler_cls == given


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({}, 8192),
        ({"max_num_batched_tokens": 2048}, 2048),
        ({"max_num_batched_tokens": 32768, "max_num_scheduled_tokens": 512}, 512),
    ],
)
def test_ranks_get_room_and_steps_keep_their_limit(given: dict[str, int], limit: int) -> None:
    made = EngineArgs(model="any", **given)
    for _ in range(2):
        make_room(made, 32768)
        assert (made.max_num_batched_tokens, made.max_num_scheduled_tokens) == (32768, limit)


@pytest.mark.parametrize("option", ["batched-tokens", "scheduled-tokens", "seqs"])
def test_less_room_than_a_limit_is_refused(option: str) -> None:
    made = EngineArgs(
        model="any", distributed_executor_backend="ray_hetero",
        additional_config={"ray_hetero": {"experts": {"prefill_step_tokens": 4096}}},
        **{f"max_num_{option.replace('-', '_')}": 8192},
    )  # fmt: skip
    said = rf"steps of 4096 tokens .* fewer than --max-num-{option} \(8192\)"
    with pytest.raises(ConfigError, match=said):
        prepare(made)

"""Steps of more tokens while no request decodes: how many a step of vLLM's scheduler may take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import SchedulerConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from ray_hetero.compat.engine.long_prompts import (
    CLASSES,
    AsyncLongPromptScheduler,
    LongPromptScheduler,
    make_room,
    schedule_long_prompts,
)
from ray_hetero.compat.worker.late_tokens import SCHEDULER
from ray_hetero.errors import ConfigError
from ray_hetero.launch.prepare import prepare

DECODING = SimpleNamespace(is_prefill_chunk=False)
READING = SimpleNamespace(is_prefill_chunk=True)


def config(**given: Any) -> SchedulerConfig:
    return SchedulerConfig(
        max_model_len=64, is_encoder_decoder=False, max_num_seqs=4, max_num_batched_tokens=512,
        max_num_scheduled_tokens=64, **given,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [LongPromptScheduler, AsyncLongPromptScheduler])
@pytest.mark.parametrize(
    ("running", "most"),
    [([], 512), ([READING] * 2, 512), ([DECODING], 64), ([READING, DECODING], 64)],
)
def test_steps_without_decoding_take_all_room(
    running: list[Any], most: int, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(
        Scheduler, "schedule", lambda self, *_: seen.append(self.max_num_scheduled_tokens)
    )
    # Its own beginning wants the configuration of an engine.
    made = kind.__new__(kind)
    made.running, made.max_num_scheduled_tokens, made.scheduler_config = running, 64, config()
    made.schedule(False)
    assert (seen, made.max_num_scheduled_tokens) == ([most], 64)


def test_the_limit_is_as_it_was_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(Scheduler, "schedule", fail)
    made = LongPromptScheduler.__new__(LongPromptScheduler)
    made.running, made.max_num_scheduled_tokens, made.scheduler_config = [], 64, config()
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

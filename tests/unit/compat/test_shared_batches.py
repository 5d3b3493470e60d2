"""Requests shared out among batches: how many tokens a step of vLLM's scheduler may take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.scheduler import Scheduler

from ray_hetero.compat.engine.shared_batches import CLASS, SharingScheduler

DECODING = SimpleNamespace(num_computed_tokens=9, num_prompt_tokens=8)
READING = SimpleNamespace(num_computed_tokens=4, num_prompt_tokens=8)


def scheduler(running: list[Any], waiting: list[Any], batches: int) -> Any:
    # Its own beginning wants the configuration of an engine.
    made: Any = SharingScheduler.__new__(SharingScheduler)
    made.running, made.waiting, made.max_num_scheduled_tokens = running, waiting, 2048
    made.vllm_config = SimpleNamespace(max_concurrent_batches=batches)
    return made


@pytest.mark.parametrize(
    ("running", "waiting", "batches", "most"),
    [
        ([DECODING] * 16, [], 2, 8),
        ([DECODING] * 15, [], 2, 8),
        ([DECODING] * 16, [], 3, 6),
        ([DECODING], [], 2, 1),
        ([], [], 2, 2048),
        ([DECODING] * 16, [READING], 2, 2048),
        ([DECODING] * 16 + [READING], [], 2, 2048),
        ([DECODING] * 6000, [], 2, 2048),
    ],
)
def test_a_step_of_decoding_takes_its_share(
    running: list[Any], waiting: list[Any], batches: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(
        Scheduler, "schedule", lambda self, *_: seen.append(self.max_num_scheduled_tokens)
    )
    made = scheduler(running, waiting, batches)
    made.schedule(False)
    assert (seen, made.max_num_scheduled_tokens) == ([most], 2048)


def test_it_is_as_it_was_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(Scheduler, "schedule", fail)
    made = scheduler([DECODING] * 4, [], 2)
    with pytest.raises(RuntimeError):
        made.schedule()
    assert made.max_num_scheduled_tokens == 2048


def test_vllm_finds_the_class() -> None:
    from vllm.config import SchedulerConfig

    config = SchedulerConfig(
        max_model_len=64, is_encoder_decoder=False, scheduler_cls=CLASS, max_num_seqs=4,
        max_num_batched_tokens=64,
    )  # fmt: skip
    assert config.get_scheduler_cls() is SharingScheduler

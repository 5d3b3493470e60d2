"""Tokens that come after their step has been scheduled are put where the model reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from ray_hetero.compat.worker.late_tokens import PLACEHOLDER, LateTokens, sampled_tokens

PROMPT = [11, 12, 13]


class Runner:
    """What is read and written of vLLM's runner: requests, in the order of its batch."""

    def __init__(self, *names: str) -> None:
        cpu = torch.device("cpu")
        self.requests = {
            name: CachedRequestState(
                name, list(PROMPT), [], SamplingParams(), None, ([],), len(PROMPT), []
            )
            for name in names
        }
        self.input_batch = SimpleNamespace(
            req_id_to_index={name: at for at, name in enumerate(names)},
            token_ids_cpu=np.zeros((len(names), 16), dtype=np.int32),
        )
        self.input_ids = CpuGpuBuffer(16, dtype=torch.int32, device=cpu, pin_memory=False)
        self.query_start_loc = CpuGpuBuffer(8, dtype=torch.int32, device=cpu, pin_memory=False)
        self.read: list[int] = []

    def _preprocess(self, scheduler_output: Any) -> None:
        self.read = self.input_ids.gpu[: scheduler_output.total_num_scheduled_tokens].tolist()

    def step(self, output: SchedulerOutput) -> list[int]:
        """As `execute_model` in a synchronous pipeline: the tokens that the model would read."""
        cached, end = output.scheduled_cached_reqs, 0
        for at, name in enumerate(cached.req_ids):
            state, new = self.requests[name], cached.new_token_ids[at]
            if new:
                state.output_token_ids.append(new[-1])
            tokens = [*PROMPT, *state.output_token_ids]
            begin = cached.num_computed_tokens[at]
            for token in tokens[begin : begin + output.num_scheduled_tokens[name]]:
                self.input_ids.np[end] = token
                end += 1
            self.query_start_loc.np[self.input_batch.req_id_to_index[name] + 1] = end
        self.input_ids.copy_to_gpu(end)
        self._preprocess(output)
        return self.read


def step(
    requests: Mapping[str, tuple[int, int]],
    *,
    known: Mapping[str, Sequence[int]] | None = None,
    finished: Sequence[str] = (),
) -> SchedulerOutput:
    """A step of requests, by name: tokens that were computed before, and those of this step.

    Args:
        requests: of the step.
        known: all tokens of those that were not in the step before.
        finished: requests that have ended.

    """
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {name: tokens for name, (_, tokens) in requests.items()}
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    output.finished_req_ids = set(finished)
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=list(requests),
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={name: list(tokens) for name, tokens in (known or {}).items()},
        new_block_ids=[None] * len(requests),
        num_computed_tokens=[computed for computed, _ in requests.values()],
        num_output_tokens=[0] * len(requests),
    )
    return output


def first(*names: str) -> SchedulerOutput:
    """A step of new requests, with their whole prompts."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = dict.fromkeys(names, len(PROMPT))
    output.total_num_scheduled_tokens = len(PROMPT) * len(names)
    return output


def late(runner: Runner, *told: Mapping[str, Sequence[int]]) -> LateTokens:
    """Tokens of a runner, where these come one after the other when they are waited for."""
    coming = iter(told)
    return LateTokens(runner, lambda: next(coming))


def test_tokens_that_are_there_are_not_waited_for() -> None:
    runner = Runner("a", "b")
    tokens = late(runner)
    tokens.begin_step(first("a", "b"))
    tokens.take({"a": [21], "b": [22]})
    output = step({"a": (3, 1), "b": (3, 1)})
    tokens.begin_step(output)
    assert output.scheduled_cached_reqs.new_token_ids == [[21], [22]]
    assert runner.step(output) == [21, 22]
    assert tokens.take_waited() == 0


def test_tokens_that_are_missing_are_put_in_before_the_model_reads_them() -> None:
    runner = Runner("a", "b", "c")
    tokens = late(runner, {"a": [21], "c": [23]}, {"a": [31], "b": [32], "c": [33]})
    tokens.begin_step(first("a", "c"))
    # The prompt of another goes on meanwhile.
    runner.requests["b"].num_computed_tokens = 0
    output = step({"a": (3, 1), "b": (1, 2), "c": (3, 1)})
    tokens.begin_step(output)
    assert output.scheduled_cached_reqs.new_token_ids == [[PLACEHOLDER], [], [PLACEHOLDER]]
    assert runner.step(output) == [21, 12, 13, 23]
    assert runner.input_batch.token_ids_cpu[0, 3] == 21
    assert tokens.take_waited() > 0
    output = step({"a": (4, 1), "b": (3, 1), "c": (4, 1)})
    tokens.begin_step(output)
    assert runner.step(output) == [31, 32, 33]
    assert runner.requests["a"].output_token_ids == [21, 31]


def test_a_request_that_has_paused_goes_on_with_what_came_meanwhile() -> None:
    runner = Runner("a", "b")
    tokens = late(runner, {"b": [32]})
    tokens.begin_step(first("a", "b"))
    tokens.take({"a": [21], "b": [22]})
    tokens.begin_step(output := step({"b": (3, 1)}))
    assert runner.step(output) == [22]
    tokens.begin_step(output := step({"a": (3, 1), "b": (4, 1)}, known={"a": [*PROMPT, 21]}))
    assert runner.step(output) == [21, 32]


def test_a_token_that_the_scheduler_has_dropped_is_not_taken_for_the_next_one() -> None:
    runner = Runner("a")
    tokens = late(runner, {"a": [29]})
    tokens.begin_step(first("a"))
    # Set back before its first token is there, and computed again in the same step.
    tokens.begin_step(output := step({"a": (0, 3)}, known={"a": PROMPT}))
    assert runner.step(output) == PROMPT
    tokens.take({"a": [21]})
    tokens.begin_step(output := step({"a": (3, 1)}))
    assert runner.step(output) == [29]


def test_a_rank_between_the_stages_does_not_wait() -> None:
    runner = Runner("a")
    tokens = LateTokens(runner, None)
    tokens.begin_step(first("a"))
    for computed in (3, 4):
        tokens.begin_step(output := step({"a": (computed, 1)}))
        assert runner.step(output) == [PLACEHOLDER]
        tokens.take({"a": [21]})
    assert len(runner.requests["a"].output_token_ids) == 2


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    runner = Runner("a", "b")
    tokens = late(runner)
    tokens.begin_step(first("a", "b"))
    tokens.take({"a": [21], "b": [22]})
    tokens.begin_step(step({"b": (3, 1)}, finished=["a"]))
    assert set(tokens._last) == set(tokens._sampled) == {"b"}


def test_steps_that_sample_nothing_tell_no_tokens() -> None:
    assert sampled_tokens(SimpleNamespace(req_ids=["a"], sampled_token_ids=[])) == {}
    output = SimpleNamespace(req_ids=["a", "b"], sampled_token_ids=[np.array([4]), []])
    assert sampled_tokens(output) == {"a": [4]}

"""vLLM's V1 model runner in steps that are scheduled before all of their tokens are sampled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from ray_hetero.compat.patching import original, replace

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Sampled = Mapping[str, Sequence[int]]
"""Tokens that a step has sampled, by request; none of a request whose prompt goes on."""

SCHEDULER = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
"""Name of the class of vLLM's that schedules steps before the tokens of those before are known."""
PLACEHOLDER = 0
"""Token that stands for one that is not known yet."""


def schedule_ahead(vllm_config: VllmConfig) -> None:
    """In the driver: schedule steps before the tokens of those before them are known.

    Replaces: nothing; names vLLM's asynchronous scheduler by `scheduler_cls`.
    Why: vLLM refuses --async-scheduling for its V1 model runner with pipeline stages, whose ranks
    it would concern too.  Here it is the scheduler's alone: ranks compute one step after another.
    Can go when: CPU ranks have a model runner that supports it with pipeline stages.
    """
    vllm_config.scheduler_config.scheduler_cls = SCHEDULER


def sampled_tokens(output: Any) -> Sampled:
    """The tokens of a step.

    Args:
        output: vLLM's `ModelRunnerOutput`.

    """
    # vLLM's runner gives no list at all where nothing was sampled.
    sampled = output.sampled_token_ids or [()] * len(output.req_ids)
    return {
        request: [int(token) for token in tokens]
        for request, tokens in zip(output.req_ids, sampled, strict=True)
        if len(tokens)
    }


class LateTokens:
    """Tokens of requests on a rank before the last stage, where steps are scheduled ahead.

    Replaces: `GPUModelRunner._preprocess` of one runner.
    Uses: `GPUModelRunner.requests`, `GPUModelRunner.input_batch`, `GPUModelRunner.input_ids`,
    `GPUModelRunner.query_start_loc`.
    Why: vLLM's V1 runner receives the tokens of a step, by a collective of its pipeline's group,
    right after it has computed that step, so that the stages of a pipeline cannot compute prompts
    at the same time; it is off by default there.  Here a step is prepared without the tokens that
    are missing, as a synchronous step is, and they are put in where the model is about to begin.
    Can go when: its V1 runner, or one that CPU ranks have, supports asynchronous scheduling with
    pipeline stages.

    Args:
        runner: of the rank, with synchronous scheduling.
        wait: waits for the tokens of the step before; None on a rank that does not look tokens up.

    """

    def __init__(self, runner: Any, wait: Callable[[], Sampled] | None) -> None:
        self._runner = runner
        self._wait = wait
        self._begun = self._told = 0
        """Steps that have begun, and those whose tokens have come: of each of them, in order."""
        self._last: dict[str, int] = {}
        """The last step of each request."""
        self._sampled: dict[str, tuple[int, int]] = {}
        """The last token of each request that is there, behind the step that has sampled it."""
        self._missing: dict[str, int] = {}
        """Positions of tokens that the running step begins with and that are not there yet."""
        self._waited_s = 0.0
        for name in ("requests", "input_batch", "input_ids", "query_start_loc"):
            original(runner, name)

        def make(preprocess: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(preprocess)
            def with_tokens(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
                if self._missing:
                    self._put_in(scheduler_output.total_num_scheduled_tokens)
                return preprocess(scheduler_output, *args, **kwargs)

            return with_tokens

        replace(runner, "_preprocess", make)

    def take(self, sampled: Sampled) -> None:
        """Keep tokens of a step for the next one of their requests."""
        self._told += 1
        if self._wait is not None:
            for request, tokens in sampled.items():
                self._sampled[request] = self._told, tokens[-1]

    def begin_step(self, scheduler_output: Any) -> None:
        """Give a step the tokens that are there, as vLLM's synchronous scheduler does.

        Args:
            scheduler_output: vLLM's `SchedulerOutput`; its `new_token_ids` are changed.

        """
        for request in scheduler_output.finished_req_ids:
            self._sampled.pop(request, None)
            self._last.pop(request, None)
        self._missing.clear()
        cached = scheduler_output.scheduled_cached_reqs
        cached.new_token_ids = [
            self._new_tokens(
                request,
                computed + scheduler_output.num_scheduled_tokens[request],
                cached.all_token_ids.get(request),
            )
            for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        ]
        if scheduler_output.num_scheduled_tokens:
            self._begun += 1
            self._last |= dict.fromkeys(scheduler_output.num_scheduled_tokens, self._begun)

    def take_waited(self) -> float:
        """Seconds that steps have waited for tokens since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def _new_tokens(self, request: str, end: int, all_tokens: list[int] | None) -> list[int]:
        """Tokens of a request that this rank does not know, of a step up to a position."""
        state = self._runner.requests[request]
        if all_tokens is not None:
            # It was not in the step before: what it has got since, or lost, the scheduler knows.
            state.output_token_ids[:] = all_tokens[state.num_prompt_tokens :]
        if end <= state.num_tokens:
            return []
        assert end == state.num_tokens + 1, "a request is at most one token ahead"
        step, token = self._sampled.get(request, (0, PLACEHOLDER))
        # A token of an earlier step is of a request that the scheduler has set back meanwhile.
        if step == self._last[request]:
            return [token]
        if self._wait is not None:
            self._missing[request] = end - 1
        return [PLACEHOLDER]

    def _put_in(self, tokens: int) -> None:
        """Wait for tokens that are missing, and put them where the model reads them."""
        assert self._wait is not None
        began = time.perf_counter()
        self.take(self._wait())
        self._waited_s += time.perf_counter() - began
        runner, batch = self._runner, self._runner.input_batch
        for request, position in self._missing.items():
            step, token = self._sampled[request]
            assert step == self._begun - 1, "the tokens of the step before are those that come next"
            index = batch.req_id_to_index[request]
            runner.requests[request].output_token_ids[-1] = token
            batch.token_ids_cpu[index, position] = token
            # The step's last token of the request, and its only one.
            runner.input_ids.np[runner.query_start_loc.np[index + 1] - 1] = token
        self._missing.clear()
        runner.input_ids.copy_to_gpu(tokens)

"""vLLM's calls of its ranks, as one generation of ranks after another answers them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import vllm.envs as envs
from vllm.v1.executor.multiproc_executor import FutureWrapper
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

from ray_hetero.compat.engine import engine_core
from ray_hetero.compat.worker.late_tokens import sampled_tokens
from ray_hetero.config import HeteroConfig
from ray_hetero.executor.rank_set import Call, RankSet
from ray_hetero.log import logger
from ray_hetero.runtime import exit_reason
from ray_hetero.runtime.heartbeat import Heartbeat
from ray_hetero.runtime.parent_watch import end_within, in_engine_process
from ray_hetero.worker.driver_calls import TELL_TOKENS
from ray_hetero.world import EngineSpec

GONE_SECONDS = 15.0
"""Longest time, in seconds, that the engine's process takes to end once its Ray is gone."""
STEP_METHODS = frozenset(
    ("execute_model", "sample_tokens", "execute_dummy_batch", "take_draft_token_ids")
)
"""Calls of which vLLM's engine cannot go on without an answer."""


class GuardedExecutor(RayExecutorV2):  # type: ignore[misc]
    """Executor's calls of its ranks, and its answer to ranks that end."""

    _config: HeteroConfig
    _spec: EngineSpec

    def _guard(self, restarts: int) -> None:
        """Begin without ranks; with so many restarts, a failure is not the end of the engine."""
        self.restarts_left = restarts
        self.futures_queue: deque[FutureWrapper] = deque()
        self.failure_callback: Callable[[], None] | None = None
        self._ranks: RankSet | None = None
        self._setup: list[Callable[[], Any]] = []
        self._is_set_up = False
        self._heart: Heartbeat | None = None
        self._steps = 0
        self._tells_tokens = False

    @property
    def is_failed(self) -> bool:
        """Whether a rank has died, failed or hangs; vLLM's executor asks."""
        return self._ranks is not None and self._ranks.is_failed

    def verdict(self) -> str | None:
        """Cause of the ranks' end, if one of them has ended or is about to."""
        return None if self._ranks is None else self._ranks.verdict()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        kv_output_aggregator: Any = None,
        ec_output_aggregator: Any = None,
    ) -> Any:
        """Call a method on all ranks; see `MultiprocExecutor.collective_rpc`.

        Raises:
            RankError: a rank died, failed in a step of the engine, or is late; also from a future.
            RuntimeError: a rank failed in another call than a step.
            TimeoutError: the caller's own time-out is over.

        """
        ranks = self._ranks
        assert ranks is not None, "calls come after the executor's initialisation"
        aggregators = [one for one in (kv_output_aggregator, ec_output_aggregator) if one]
        # Whoever puts answers together needs those of all ranks.
        answering = None if aggregators else unique_reply_rank
        call = self._call_of(method, timeout, args, kwargs or {}, answering)
        if not self._is_set_up:
            self._setup.append(partial(self.collective_rpc, method, timeout, args, kwargs))
        ranks.send(call)

        def answer() -> Any:
            answers = ranks.answers(call)
            if method == "sample_tokens" and self._tells_tokens:
                # Before the engine looks at them: the next step waits for them already.
                ranks.tell(TELL_TOKENS, sampled_tokens(answers[0]))
            if answering is not None:
                return answers[0]
            together: Any = answers
            for aggregator in aggregators:
                together = aggregator.aggregate(answers, output_rank=unique_reply_rank or 0)
            return together

        # A future costs more than all the rest of a call.
        if not non_block and not self.futures_queue:
            return answer()
        future = FutureWrapper(self.futures_queue, answer)
        return future if non_block else future.result()

    def _call_of(
        self,
        method: str | Callable[..., Any],
        timeout: float | None,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        answering: int | None,
    ) -> Call:
        if method in STEP_METHODS:
            if method == "execute_model":
                self._steps += 1
            return Call(method, args, kwargs, answering, self._steps, *self._step_limit)
        if timeout is not None:
            return Call(method, args, kwargs, answering, None, timeout, "")
        limit_s = self._config.warmup.step_timeout_s
        return Call(method, args, kwargs, answering, None, limit_s, "warmup.step_timeout_s")

    @cached_property
    def _step_limit(self) -> tuple[float, str]:
        own = self._config.serving.step_timeout_s
        if own is not None:
            return own, "serving.step_timeout_s"
        return envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"

    def _on_failure(self, report: str) -> None:
        if self.restarts_left:
            logger.error("ray_hetero: %s; starting the ranks again", report)
        else:
            logger.error("ray_hetero: %s; stopping the engine", report)
            exit_reason.leave(report)

    def _on_stopped(self) -> None:
        if self.failure_callback is not None:
            self.failure_callback()

    def _on_ray_gone(self, report: str) -> None:
        """End the engine: without its Ray no rank can be called, nor started again."""
        self.restarts_left = 0
        if in_engine_process():
            # Calls to Ray may wait for what is gone.
            end_within(GONE_SECONDS)
        if self._ranks is None:
            self._on_failure(report)
        else:
            self._ranks.fail(report)

    def _begin_heartbeat(self) -> None:
        """Let the API servers see from now on that this process goes on."""
        if self._spec.heartbeat_path and in_engine_process():
            index = self.parallel_config.data_parallel_index
            self._heart = Heartbeat(self._spec.heartbeat_path, index)
            engine_core.tell_of_steps(
                self.vllm_config, self._heart.begin_step, self._heart.end_step
            )

    def _end_heartbeat(self) -> None:
        """Say that this process ends, which takes as long as it takes."""
        if self._heart is not None:
            self._heart.end()

    def _stop_ranks(self) -> None:
        """End the processes of all ranks, whatever they are waiting for."""
        if self._ranks is not None:
            self._ranks.stop()

    def _close_ranks(self) -> None:
        """Stop the ranks, and forget what they were asked."""
        if self._ranks is not None:
            self._ranks.close()
        self.futures_queue.clear()

    def _set_up_again(self) -> None:
        """Ask new ranks for everything that vLLM has asked for on the engine's way up."""
        for ask in self._setup:
            ask()

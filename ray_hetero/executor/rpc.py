"""The engine's calls of its ranks: every wait has a limit, and ends when a rank does.

vLLM waits for the rank that answers.  What the others do meanwhile it does not learn: one that has
died, hangs, or failed in a stage that gives no answer, holds everything up until a time-out that
names nobody.  Here the first one who knows what happened makes a report (`Failure`), which ends
every wait, stops the other ranks and is the last line of the log.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import cloudpickle
import ray
import vllm.envs as envs
from vllm.v1.executor.multiproc_executor import FutureWrapper, WorkerProc
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

from ray_hetero.config import HeteroConfig
from ray_hetero.errors import RankError
from ray_hetero.executor.actors import RankHandle
from ray_hetero.executor.failure import Failure
from ray_hetero.executor.rank_processes import RankProcesses
from ray_hetero.executor.rank_queues import VERDICT_SECONDS, AnswerQueue, RequestQueue
from ray_hetero.log import logger
from ray_hetero.runtime import exit_reason

STEP_METHODS = frozenset(
    ("execute_model", "sample_tokens", "execute_dummy_batch", "take_draft_token_ids")
)
"""Calls of which vLLM's engine cannot go on without an answer."""


@dataclass(slots=True)
class Call:
    """One call of all ranks; what a message would say of it is put together only for one."""

    method: str | Callable[..., Any]
    args: Sequence[Any]
    step: int | None
    """Number of the step it belongs to; None for what is no step."""
    limit_s: float
    """Longest wait for all answers."""
    key: str
    """Name of the setting that holds the limit; empty where the caller gave it."""

    def __str__(self) -> str:
        name = self.method
        if not isinstance(name, str):
            name = getattr(name, "__name__", "a function")
        if self.step is None:
            return name
        if name == "execute_model":
            name = f"{name} of {self.args[0].total_num_scheduled_tokens} tokens"
        return f"step {self.step} ({name})"


class GuardedExecutor(RayExecutorV2):  # type: ignore[misc]
    """What an executor does about ranks that die, fail or hang."""

    rpc_broadcast_mq: RequestQueue | None
    response_mqs: Sequence[AnswerQueue]
    _config: HeteroConfig
    _processes: RankProcesses | None
    """None before the ranks have told."""

    def _guard(self, restarts: int) -> None:
        """Begin; with so many restarts, a failure is not the end of the engine."""
        self.restarts_left = restarts
        self.ray_worker_handles: list[RankHandle] = []
        self.futures_queue: deque[FutureWrapper] = deque()
        self.failure_callback: Callable[[], None] | None = None
        self._processes = None
        self._failure = Failure()
        self._setup: list[Callable[[], Any]] = []
        self._is_set_up = False
        self._steps = 0

    @property
    def is_failed(self) -> bool:
        """Whether a rank has died, failed or hangs; vLLM's executor asks."""
        return self._failure.report is not None

    def verdict(self) -> str | None:
        """What ended the ranks, if one of them has ended or is just about to."""
        return self._failure.wait(VERDICT_SECONDS)

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
            TimeoutError: the caller's own time-out is over.

        """
        call = self._call_of(method, timeout, args)
        if not self._is_set_up:
            self._setup.append(partial(self.collective_rpc, method, timeout, args, kwargs))
        aggregators = [one for one in (kv_output_aggregator, ec_output_aggregator) if one]
        # Whoever puts answers together needs those of all ranks.
        answering = None if aggregators else unique_reply_rank
        self._failure.check()
        self._send(call, kwargs or {}, answering)
        deadline = time.monotonic() + call.limit_s

        def answer() -> Any:
            answers = self._answers(call, answering, deadline)
            if answering is not None:
                return answers[0]
            together = answers
            for aggregator in aggregators:
                together = aggregator.aggregate(answers, output_rank=unique_reply_rank or 0)
            return together

        # A future costs more than all the rest of a call.
        if not non_block and not self.futures_queue:
            return answer()
        future = FutureWrapper(self.futures_queue, answer)
        return future if non_block else future.result()

    def _send(self, call: Call, kwargs: dict[str, Any], answering: int | None) -> None:
        """Send a call to all ranks, of which one answers, or None for all."""
        assert self.rpc_broadcast_mq is not None
        method = call.method
        sent = method if isinstance(method, str) else cloudpickle.dumps(method)
        try:
            self.rpc_broadcast_mq.enqueue((sent, call.args, kwargs, answering))
        except (TimeoutError, RuntimeError) as error:
            raise self._meaning(call, error) from None

    def _answers(self, call: Call, answering: int | None, deadline: float) -> list[Any]:
        """The answers of one rank, or None for all, until a moment of the monotonic clock."""
        queues = self.response_mqs
        answers = []
        for queue in queues if answering is None else (queues[answering],):
            try:
                status, answer = queue.dequeue(max(0.0, deadline - time.monotonic()))
            except (TimeoutError, RuntimeError) as error:
                raise self._meaning(call, error) from None
            if status != WorkerProc.ResponseStatus.SUCCESS:
                raise self._meaning(call, RuntimeError(f"a rank failed with: {answer}"))
            answers.append(answer)
        return answers

    def _call_of(
        self, method: str | Callable[..., Any], timeout: float | None, args: Sequence[Any]
    ) -> Call:
        if method in STEP_METHODS:
            if method == "execute_model":
                self._steps += 1
            return Call(method, args, self._steps, *self._step_limit)
        if timeout is not None:
            return Call(method, args, None, timeout, "")
        limit_s = self._config.warmup.step_timeout_s
        return Call(method, args, None, limit_s, "warmup.step_timeout_s")

    @cached_property
    def _step_limit(self) -> tuple[float, str]:
        own = self._config.serving.step_timeout_s
        if own is not None:
            return own, "serving.step_timeout_s"
        return envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"

    def _meaning(self, call: Call, error: Exception) -> Exception:
        """What to raise for an error that ended a wait; the ranks are stopped where they must be.

        Args:
            call: the call that was waited for.
            error: TimeoutError, or RuntimeError for a rank's own error.

        """
        if isinstance(error, TimeoutError):
            if not call.key:
                return TimeoutError(f"{call} was not done in {call.limit_s:g} s")
            where = self._look()
            return self._fail(f"{call} was not done in {call.limit_s:g} s ({call.key}): {where}")
        # In other calls than steps a rank's own error is the caller's.
        if call.step is None:
            return error
        return self._fail(self.verdict() or f"{call} failed: {error}")

    def _look(self) -> str:
        if self._processes is None:
            return "the ranks are not known yet"
        doing = self._processes.look()
        # In the log only: reports go to clients too.
        logger.error("ray_hetero: the ranks' logs, with the stacks of their threads: %s",
                     self._processes.logs())  # fmt: skip
        return f"{doing}. Their stacks are in the ranks' logs, which are named above"

    def _fail(self, report: str) -> RankError:
        """Stop all ranks; called in the thread that knows why, the first report counts.

        Returns:
            The error to raise.

        """
        if not self._failure.tell(report):
            return RankError(self._failure.report)
        if self.restarts_left:
            logger.error("ray_hetero: %s; starting the ranks again", report)
        else:
            logger.error("ray_hetero: %s; stopping the engine", report)
            exit_reason.leave(report)
        self._kill_ranks()
        if self.failure_callback is not None:
            self.failure_callback()
        return RankError(report)

    def _kill_ranks(self) -> None:
        """End the processes of all ranks, whatever they are waiting for."""
        if not ray.is_initialized():
            return
        for handle in self.ray_worker_handles:
            ray.kill(handle.actor)
        if self._processes is not None:
            self._processes.kill()

    def _set_up_again(self) -> None:
        """Ask new ranks for everything that vLLM has asked for on the engine's way up."""
        for ask in self._setup:
            ask()

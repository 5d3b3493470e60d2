"""One generation of ranks: every call of them, every answer, and their end.

vLLM waits for the rank that answers.  What the others do meanwhile it does not learn: one that has
died, hangs, or failed in a stage that gives no answer, holds everything up until a time-out that
names nobody.  Here the first one who knows what happened makes a report (`Failure`), which ends
every wait and stops the other ranks.

A rank answers each call that is addressed to it exactly once, in order.  So the driver need not be
sent a call's number back: it keeps, for each rank, the numbers of the calls that the rank has yet
to answer.  An answer of an earlier call, one that another rank's error or a time-out has ended, is
dropped and never taken for a later call's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
from vllm.v1.executor.multiproc_executor import WorkerProc

from ray_hetero.compat.worker.message_queues import error_of
from ray_hetero.errors import RankError
from ray_hetero.executor.actors import RankActors, RankWatch
from ray_hetero.executor.failure import Failure
from ray_hetero.executor.rank_queues import AnswerQueue, RequestQueue, wait_until_ready
from ray_hetero.log import logger
from ray_hetero.worker.warmup_schedule import Step
from ray_hetero.world import World

VERDICT_SECONDS = 6.0
"""Longest wait for the watch to say which rank was the first to fail, after one has, in seconds."""
OTHERS_SECONDS = 2.0
"""Longest wait for other ranks' answers to a call that one rank has failed in, in seconds."""
NOBODY = -1
"""The rank that answers a call which wants no answer."""
CLOSED = "the ranks of this engine have been stopped"


@dataclass(slots=True)
class Call:
    """One call of all ranks; what a message would say of it is put together only for one."""

    method: str | Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    answering: int | None
    """The one rank that answers; None for all."""
    step: int | None
    """Number of the engine's step that the call belongs to; None for what is no step."""
    limit_s: float
    """Longest wait for all answers, in seconds."""
    key: str
    """Name of the setting that holds the limit; empty where the caller gave it."""
    number: int = field(default=0, init=False)
    """Number among all calls of a set of ranks, from 1; 0 before the call is sent."""
    deadline: float = field(default=0.0, init=False)
    """End of the wait for answers, in seconds of the monotonic clock."""

    def __str__(self) -> str:
        name = self.method
        if not isinstance(name, str):
            name = getattr(name, "__name__", "a function")
        if self.step is None:
            return name
        if name == "execute_model":
            name = f"{name} of {self.args[0].total_num_scheduled_tokens} tokens"
        return f"step {self.step} ({name})"


class RankSet:
    """The ranks of an engine from their start to their end; those of a restart are another set.

    Life: created around its actors → `connect` → calls → `close`.

    Args:
        world: seats of the ranks.
        actors: of the ranks.
        on_failure: called once with what ended the ranks, before they are stopped.
        on_stopped: called once after a failure, when the ranks are stopped; not for a set that was
            closed meanwhile.

    """

    def __init__(
        self,
        world: World,
        actors: RankActors,
        on_failure: Callable[[str], object],
        on_stopped: Callable[[], object],
    ) -> None:
        self.world = world
        self.actors = actors
        self.failure = Failure()
        self._on_failure = on_failure
        self._on_stopped = on_stopped
        self._lock = threading.Lock()
        self._is_closed = False
        self._requests: RequestQueue | None = None
        self._answers: tuple[AnswerQueue, ...] = ()
        self._watch: RankWatch | None = None
        self._everyone = range(len(world.seats))
        self._calls = 0
        self._first_step = 0
        self._answered_at = 0.0
        self._owed: tuple[deque[int], ...] = tuple(deque() for _ in world.seats)

    # --- start --------------------------------------------------------------------------------

    def connect(
        self, requests: RequestQueue, answers: Sequence[AnswerQueue], limit_s: float, key: str
    ) -> None:
        """Make the ranks serve these queues, and watch them from now on.

        Args:
            requests: queue that every rank reads.
            answers: queues of the ranks, by rank.
            limit_s: longest wait for the ranks to connect, in seconds.
            key: name of the setting that holds the limit.

        Raises:
            RankError, StartupError: as `wait_until_ready`.

        """
        self._requests, self._answers = requests, tuple(answers)
        # The ranks subscribe inside run(), so it must be under way before the wait.
        self.actors.run()
        self._watch = RankWatch(self.actors, len(self.world.members), self.fail)
        wait_until_ready([requests, *answers], self.failure, limit_s, key)
        requests.unlink()

    # --- calls --------------------------------------------------------------------------------

    def send(self, call: Call) -> None:
        """Send a call to all ranks.

        Raises:
            RankError: a rank has ended, or takes no messages.
            TimeoutError: the caller's own limit is over.

        """
        method = call.method
        sent = method if isinstance(method, str) else cloudpickle.dumps(method)
        answering = call.answering
        try:
            call.number = self._send((sent, call.args, call.kwargs, answering), answering)
        except TimeoutError:
            raise self._late(call) from None
        call.deadline = time.monotonic() + call.limit_s

    def tell(self, method: str, *args: Any) -> None:
        """Send a call that nobody answers to all ranks.

        Raises:
            RankError: a rank has ended.
            TimeoutError: a rank takes no messages.

        """
        self._enqueue((method, args, {}, NOBODY))

    def _enqueue(self, message: tuple[Any, ...]) -> None:
        """Send a message as vLLM's ranks expect it."""
        self.failure.check()
        assert self._requests is not None, "calls come after connect"
        self._requests.enqueue(message)

    def _send(self, message: tuple[Any, ...], answering: int | None) -> int:
        """Send a message that is answered; its number."""
        self._enqueue(message)
        self._calls += 1
        for rank in self._everyone if answering is None else (answering,):
            self._owed[rank].append(self._calls)
        return self._calls

    def answers(self, call: Call) -> list[Any]:
        """Wait for the answers to a call, and read all of them; calls are read in order.

        Raises:
            RankError: a rank has ended, failed in a step, or is late.
            RuntimeError: a rank answered with an error to another call than a step.
            TimeoutError: the caller's own limit is over.

        """
        self.failure.check()
        if call.step is not None:
            # A step that was sent while the one before was computed begins with that one's end.
            call.deadline = max(call.deadline, self._answered_at + call.limit_s)
        found: list[Any] = []
        failed: dict[int, str] = {}
        is_late = False
        answering = call.answering
        for rank in self._everyone if answering is None else (answering,):
            try:
                status, answer = self._take(rank, call.number, call.deadline)
            except TimeoutError:
                is_late = True
                continue
            if status is WorkerProc.ResponseStatus.SUCCESS:
                found.append(answer)
                continue
            failed[rank] = error_of(answer)
            # Those that the failed one holds up are not waited for: what they owe is dropped later.
            call.deadline = min(call.deadline, time.monotonic() + OTHERS_SECONDS)
        if failed:
            raise self._failed(call, failed)
        if is_late:
            raise self._late(call)
        self._answered_at = time.monotonic()
        return found

    def _take(self, rank: int, number: int, deadline: float) -> tuple[Any, Any]:
        """A rank's answer to the call of this number; answers to earlier calls are dropped."""
        queue, owed = self._answers[rank], self._owed[rank]
        while True:
            status, answer = queue.dequeue(max(0.0, deadline - time.monotonic()))
            answered = owed.popleft()
            if answered == number:
                return status, answer
            assert answered < number, "calls are read in the order in which they were sent"

    def _failed(self, call: Call, failed: Mapping[int, str]) -> Exception:
        by_error: dict[str, list[str]] = {}
        for rank, error in failed.items():
            by_error.setdefault(error, []).append(self.world.describe(rank))
        said = "; ".join(
            f"{' and '.join(ranks)} failed with: {error}" for error, ranks in by_error.items()
        )
        # In other calls than steps a rank's own error is the caller's.
        if call.step is None:
            return RuntimeError(said)
        return self.fail(self.verdict() or f"{call} failed: {said}")

    def _late(self, call: Call) -> Exception:
        if not call.key:
            return TimeoutError(f"{call} was not done in {call.limit_s:g} s")
        where = self.look()
        return self.fail(f"{call} was not done in {call.limit_s:g} s ({call.key}): {where}")

    # --- steps of the warm-up: `lockstep.run_schedule` ----------------------------------------

    def send_steps(self, per_stage: Sequence[Sequence[Step]]) -> None:
        """Send the n-th steps of all stages in one message, for each n; each rank takes its own."""
        self._first_step = self._calls + 1
        for by_stage in zip(*per_stage, strict=True):
            self._send(("perform_step", (by_stage,), {}, None), None)

    def next_answer(self, rank: int, timeout_s: float) -> Any:
        """Wait for a rank's next answer to the steps that were sent last.

        Raises:
            TimeoutError: there is none in time.
            RankError: the rank answered with an error, or a rank died.

        """
        number = 0
        while number < self._first_step:
            status, answer = self._answers[rank].dequeue(timeout_s)
            number = self._owed[rank].popleft()
        if status is not WorkerProc.ResponseStatus.SUCCESS:
            # Its error may follow from another rank's end, which the watch tells apart.
            said = f"warm-up: {self.world.describe(rank)} failed: {error_of(answer)}"
            raise RankError(self.verdict() or said)
        return answer

    def warmed_up(self) -> None:
        """Remove the names of the sockets: every rank has connected to them and answered."""
        if self._requests is not None:
            self._requests.unlink_sockets()

    # --- end ----------------------------------------------------------------------------------

    @property
    def is_failed(self) -> bool:
        """Whether a rank has died, failed or hangs, or all have been stopped."""
        return self.failure.report is not None

    def verdict(self) -> str | None:
        """Wait for what ended the ranks, if one of them has ended or is just about to."""
        return self.failure.wait(VERDICT_SECONDS)

    def look(self) -> str:
        """Say what every rank is doing; where their stacks are goes to the log."""
        processes = self.actors.processes
        if processes is None:
            return "the ranks are not known yet"
        doing = processes.look()
        # In the log only: reports go to clients too.
        logger.error("ray_hetero: the ranks' logs, with the stacks of their threads: %s",
                     processes.logs())  # fmt: skip
        return f"{doing}. Their stacks are in the ranks' logs, which are named above"

    def fail(self, report: str) -> RankError:
        """Stop all ranks; called in the thread that knows why, and the first report counts.

        Returns:
            The error to raise.

        """
        if self.failure.tell(report):
            self._on_failure(report)
            self.actors.end()
            # The engine may go on with other ranks by now, which this must not end.
            with self._lock:
                if not self._is_closed:
                    self._on_stopped()
        return RankError(self.failure.report)

    def stop(self) -> None:
        """End the processes of the ranks, from any thread."""
        self.actors.end()

    def close(self) -> None:
        """End the ranks, and whatever of this process belongs to them; safe to call twice.

        No call is waited for: the engine has none under way, or has given it up.
        """
        with self._lock:
            self._is_closed = True
        # From here on no report is made of ranks that end because they are asked to.
        self.failure.tell(CLOSED)
        if self._watch is not None:
            self._watch.stop()
        self.actors.end()
        if self._watch is not None:
            self._watch.join()
        if self._requests is not None:
            self._requests.unlink_sockets()
            self._requests.shutdown()
        for queue in self._answers:
            queue.shutdown()
        self._requests, self._answers = None, ()

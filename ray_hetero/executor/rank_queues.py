"""The driver's message queues to and from the ranks.  No wait for a rank outlives that rank."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.executor.multiproc_executor import WorkerProc

from ray_hetero.errors import RankError, StartupError
from ray_hetero.executor.failure import Failure
from ray_hetero.executor.lockstep import describe
from ray_hetero.worker.warmup import Step
from ray_hetero.world import World

POLL_SECONDS = 0.5
"""How often a wait looks whether a rank has ended."""
VERDICT_SECONDS = 6.0
"""Longest wait for the watch to say which rank was the first to fail, after one has."""

T = TypeVar("T")


def _in_slices(wait: Callable[[float], T], failure: Failure, limit_s: float | None) -> T:
    """Wait in short slices.

    Raises:
        RankError: a rank has ended.
        TimeoutError: the limit is over.

    """
    left = math.inf if limit_s is None else limit_s
    deadline = time.monotonic() + left
    while True:
        failure.check()
        try:
            return wait(max(0.0, min(POLL_SECONDS, left)))
        except TimeoutError:
            if left <= POLL_SECONDS:
                raise
        left = deadline - time.monotonic()


class RequestQueue(MessageQueue):  # type: ignore[misc]
    """The queue that every rank reads; full when a rank takes nothing out of it."""

    failure: Failure
    limit_s: float

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Put a message in.

        Raises:
            RankError, TimeoutError: as `_in_slices`, with `limit_s` unless a timeout is given.

        """
        limit_s = self.limit_s if timeout is None else timeout
        _in_slices(partial(super().enqueue, obj), self.failure, limit_s)


class AnswerQueue:
    """One rank's queue to the driver."""

    def __init__(self, queue: MessageQueue, failure: Failure) -> None:
        self._queue = queue
        self._failure = failure

    def dequeue(self, timeout: float | None = None) -> Any:
        """The next answer.

        Raises:
            RankError, TimeoutError: as `_in_slices`.

        """
        return _in_slices(self._queue.dequeue, self._failure, timeout)

    def wait_until_ready(self) -> None:
        """Wait until the rank has connected."""
        self._queue.wait_until_ready()

    def shutdown(self) -> None:
        """Wake up whoever waits."""
        self._queue.shutdown()


def wait_until_ready(
    queues: Sequence[MessageQueue | AnswerQueue], failure: Failure, limit_s: float, key: str
) -> None:
    """Wait until all ranks have connected to the queues.

    Args:
        queues: the driver's ends.
        failure: what ends the wait.
        limit_s: longest wait.
        key: name of the setting that holds the limit.

    Raises:
        RankError: a rank has ended.
        StartupError: a rank did not connect in time.

    """
    # vLLM's own wait has no limit and cannot be woken up.
    waiting = threading.Thread(
        target=lambda: [queue.wait_until_ready() for queue in queues], daemon=True
    )
    waiting.start()

    def ready(slice_s: float) -> None:
        waiting.join(slice_s)
        if waiting.is_alive():
            raise TimeoutError

    try:
        _in_slices(ready, failure, limit_s)
    except TimeoutError:
        raise StartupError(
            f"a rank did not connect to its message queues in {limit_s:g} s ({key}). Look at the "
            "ranks' logs, or raise the limit."
        ) from None


class RankQueues:
    """Sends steps of the warm-up to all ranks and takes their answers one by one.

    Args:
        world: for naming ranks.
        requests: queue that every rank reads.
        answers: one queue a rank, by rank.
        failure: what is known of a dead rank.

    """

    def __init__(
        self,
        world: World,
        requests: MessageQueue,
        answers: Sequence[AnswerQueue],
        failure: Failure,
    ) -> None:
        self._world = world
        self._requests = requests
        self._answers = answers
        self._failure = failure

    def send(self, per_stage: Sequence[Sequence[Step]]) -> None:
        """Send the n-th steps of all stages in one message, for each n; each rank takes its own."""
        for by_stage in zip(*per_stage, strict=True):
            self._requests.enqueue(("perform_step", (by_stage,), {}, None))

    def answer(self, rank: int, timeout_s: float) -> Any:
        """The rank's next answer; TimeoutError when there is none in time.

        Raises:
            RankError: the rank answered with an error, or a rank died.

        """
        status, result = self._answers[rank].dequeue(timeout=timeout_s)
        if status != WorkerProc.ResponseStatus.SUCCESS:
            # Its error may follow from another rank's end, which the watch tells apart.
            report = self._failure.wait(VERDICT_SECONDS)
            said = f"warm-up: {describe(self._world, rank)} failed: {result}"
            raise RankError(report or said)
        return result

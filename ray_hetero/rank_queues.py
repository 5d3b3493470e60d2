"""The driver's message queues to and from the ranks, as the warm-up schedule uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.executor.multiproc_executor import WorkerProc

from ray_hetero.errors import RankError
from ray_hetero.lockstep import describe
from ray_hetero.warmup import Step
from ray_hetero.world import World


class RankQueues:
    """Sends steps to all ranks and takes their answers one by one.

    Args:
        world: for naming ranks.
        requests: queue that every rank reads.
        answers: one queue a rank, by rank.
        has_failed: whether a rank is known to be dead.

    """

    def __init__(
        self,
        world: World,
        requests: MessageQueue,
        answers: Sequence[MessageQueue],
        has_failed: Callable[[], bool],
    ) -> None:
        self._world = world
        self._requests = requests
        self._answers = answers
        self._has_failed = has_failed

    def send(self, per_stage: Sequence[Sequence[Step]]) -> None:
        """Send the n-th steps of all stages in one message, for each n; each rank takes its own."""
        for by_stage in zip(*per_stage, strict=True):
            self._requests.enqueue(("perform_step", (by_stage,), {}, None))

    def answer(self, rank: int, timeout_s: float) -> Any:
        """The rank's next answer; TimeoutError when there is none in time.

        Raises:
            RankError: the rank answered with an error, or a rank died.

        """
        if self._has_failed():
            raise RankError("a rank died during warm-up; the log above says which")
        status, result = self._answers[rank].dequeue(timeout=timeout_s)
        if status != WorkerProc.ResponseStatus.SUCCESS:
            raise RankError(f"warm-up: {describe(self._world, rank)} failed: {result}")
        return result

"""The driver's message queues to and from the ranks.  No wait for a rank outlives that rank."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import ray
import vllm.envs as envs
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from ray_hetero.compat.worker import message_queues
from ray_hetero.errors import StartupError
from ray_hetero.executor.failure import Failure
from ray_hetero.world import World

POLL_SECONDS = 0.5
"""Interval at which a wait looks whether a rank has ended, in seconds."""

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
        except RuntimeError:
            # A queue that is shut down only says that the wait was cancelled.
            failure.check()
            raise
        left = deadline - time.monotonic()


class RequestQueue(MessageQueue):  # type: ignore[misc]
    """The queue that every rank reads; full when a rank takes nothing out of it."""

    failure: Failure
    """Failure of a rank, which ends a wait of this queue."""
    limit_s: float
    """Longest wait for room in this queue, in seconds."""

    @classmethod
    def open(cls, world: World, failure: Failure, limit_s: float) -> RequestQueue:
        """Open the queue to the ranks of a world, from the driver's process.

        Ranks on the driver's node read shared memory, all others a socket.
        """
        local = [seat.rank for seat in world.seats if seat.is_driver_node]
        queue = cls(
            len(world.seats),
            len(local),
            local_reader_ranks=local,
            max_chunk_bytes=envs.VLLM_MQ_MAX_CHUNK_BYTES_MB << 20,
            connect_ip=ray.util.get_node_ip_address(),
        )
        queue.failure, queue.limit_s = failure, limit_s
        return queue

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Put a message in.

        Raises:
            RankError, TimeoutError: as `_in_slices`, with `limit_s` unless a timeout is given.

        """
        limit_s = self.limit_s if timeout is None else timeout
        _in_slices(partial(super().enqueue, obj), self.failure, limit_s)

    def unlink(self) -> None:
        """Remove the name of the shared memory, which every rank has mapped."""
        message_queues.unlink_once_attached(self)

    def unlink_sockets(self) -> None:
        """Remove the names of the sockets, to which every rank has connected."""
        message_queues.unlink_sockets(self)


class AnswerQueue:
    """One rank's queue to the driver.

    Args:
        queue: the driver's end.
        failure: what ends a wait.

    """

    def __init__(self, queue: MessageQueue, failure: Failure) -> None:
        self._queue = queue
        self._failure = failure

    @classmethod
    def open(cls, handle: Any, failure: Failure, *, shares_cores: bool = False) -> AnswerQueue:
        """Open the queue that a rank has made, by its handle.

        Args:
            handle: what the rank has exported.
            failure: what ends a wait.
            shares_cores: whether ranks of another session compute on all cores that this process
                may use.

        """
        queue = MessageQueue.create_from_handle(handle, 0)
        message_queues.nap_while_waiting(queue, naps_always=shares_cores)
        return cls(queue, failure)

    def dequeue(self, timeout: float | None = None) -> Any:
        """Take the next answer.

        Raises:
            RankError, TimeoutError: as `_in_slices`.

        """
        return _in_slices(self._queue.dequeue, self._failure, timeout)

    def wait_until_ready(self) -> None:
        """Wait until the rank has connected."""
        self._queue.wait_until_ready()

    def shutdown(self) -> None:
        """Wake up whoever waits for an answer."""
        self._queue.shutdown()


def wait_until_ready(
    queues: Sequence[RequestQueue | AnswerQueue], failure: Failure, limit_s: float, key: str
) -> None:
    """Wait until all ranks have connected to the queues.

    Args:
        queues: the driver's ends.
        failure: what ends the wait.
        limit_s: longest wait, in seconds.
        key: name of the setting that holds the limit.

    Raises:
        RankError: a rank has ended.
        StartupError: a rank did not connect in time, or not as it should.

    """
    is_ready: Future[None] = Future()

    def connect() -> None:
        try:
            for queue in queues:
                queue.wait_until_ready()
        # A thread has nobody to raise to: whatever it is, the wait below tells of it.
        except BaseException as error:  # noqa: BLE001
            is_ready.set_exception(error)
        else:
            is_ready.set_result(None)

    # vLLM's own wait has no limit and cannot be woken up.
    threading.Thread(target=connect, daemon=True, name="QueuesReady").start()

    def ended(slice_s: float) -> BaseException | None:
        return is_ready.exception(slice_s)

    try:
        error = _in_slices(ended, failure, limit_s)
    except TimeoutError:
        raise StartupError(
            f"a rank did not connect to its message queues in {limit_s:g} s ({key}). Look at the "
            "ranks' logs, or raise the limit."
        ) from None
    if error is not None:
        raise StartupError(
            f"a rank's message queue did not open: expected the other end's greeting, got "
            f"{error!r}. Look at the ranks' logs."
        ) from error

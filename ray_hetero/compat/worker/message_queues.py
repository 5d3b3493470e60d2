"""vLLM's message queues and shared memory: no name of theirs outlives its last reader."""

from __future__ import annotations

import glob
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

from ray_hetero.compat.patching import original


def unlink_once_attached(queue: Any) -> None:
    """Remove a message queue's name from /dev/shm once every reader has mapped it.

    Replaces: ownership of a `MessageQueue`'s shared memory.
    Uses: `MessageQueue.buffer`, `ShmRingBuffer.is_creator`, `ShmRingBuffer.shared_memory`.
    Why: ShmRingBuffer removes it when its creator is collected, which a killed process never
    does; mapped memory without a name goes away with the last process, however that one ends.
    Can go when: vLLM unlinks at attach time itself.
    """
    buffer = original(queue, "buffer")
    if buffer is not None and original(buffer, "is_creator"):
        buffer.is_creator = False
        original(buffer, "shared_memory").unlink()


def unlink_sockets(queue: Any) -> None:
    """Remove the names of a message queue's ZeroMQ sockets; to be called by its writer once every
    reader has connected to both.

    Replaces: names of a `MessageQueue`'s ZeroMQ sockets.
    Uses: `MessageQueue.handle`.
    Why: as for the ring buffer: ZeroMQ removes them when they are closed, which in a killed process
    they never are.  Readers connect to the second one in the background, so only a message that a
    reader has sent since tells that it has.
    Can go when: vLLM removes them at attach time itself.
    """
    handle = original(queue, "handle")
    for name in ("local_subscribe_addr", "local_notify_addr"):
        if address := original(handle, name):
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


def unlink_cpu_shared_memory(communicator: Any) -> None:
    """Remove a CPU group's shared-memory names once all its ranks have mapped them.

    Replaces: names of a CPU group's shared memory.
    Uses: `CpuCommunicator.dist_module`.
    Why: as for the message queues; _CPUSHMDistributed leaves them to a destructor.
    Can go when: vLLM unlinks at attach time itself.
    """
    shared = original(communicator, "dist_module")
    if name := getattr(shared, "group_name", None):
        # The barrier at the end of _init_cpu_shm has passed: every rank has its mapping.
        for path in Path("/dev/shm").glob(f"{glob.escape(name)}*"):  # noqa: S108
            path.unlink(missing_ok=True)


FIRST_NAP_S = 2e-3
"""Seconds since the last message in which a reader polls: a nap of any length ends some 0.1 ms
late, which steps of few milliseconds would show."""
NAP_SHARE = 0.05
"""Length of a nap as a share of the time since the last message."""
LONGEST_NAP_S = 2e-4
"""Longest nap of a reader, in seconds.  One that ends with the message is late by half of it."""
POLLED_SHARE = 0.15
"""Share of the time between two messages, at the end of the same time two messages later, in which
a reader polls again: the next one is expected then."""


def nap_while_waiting(queue: Any, *, naps_always: bool) -> None:
    """Let a queue's reader sleep for moments while messages are frequent, instead of polling.

    Replaces: `SpinCondition.wait` of one queue.
    Uses: `MessageQueue._spin_condition`, `SpinCondition.record_read`, `SpinCondition.last_read`,
    `SpinCondition.busy_loop_s`.
    Why: it polls for a second after each message and only yields its core, which the ordering of a
    GPU's work needs, and ranks on GPUs.  Linux yields within a scheduling group (a session or a
    control group), so that a rank that computes on the same core as a member of another group, as
    below a Ray that was started before, gets half of the core.
    Can go when: the manner of waiting is an option.

    Args:
        queue: a `MessageQueue` that this process reads; one whose messages come through a socket
            stays as it is.
        naps_always: whether it naps also when the next message is expected: steps take as long as
            the one before, as a rule, and none is to wait for the end of a nap.

    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    stock, stock_record = original(SpinCondition, "wait"), original(SpinCondition, "record_read")
    if (condition := original(queue, "_spin_condition")) is None:
        return
    original(condition, "last_read")
    busy_loop_s = original(condition, "busy_loop_s")
    expected_s = math.inf if naps_always else 0.0
    # Of a step there are two messages, long after the one before and soon after it in turns.
    last_s = 0.0

    def record_read() -> None:
        nonlocal expected_s, last_s
        before = condition.last_read
        stock_record(condition)
        if not naps_always:
            expected_s = (1 - POLLED_SHARE) * last_s
            last_s = condition.last_read - before

    def wait(timeout_ms: int | None = None) -> None:
        passed = time.monotonic() - condition.last_read
        if FIRST_NAP_S < passed <= min(busy_loop_s, expected_s):
            time.sleep(min(LONGEST_NAP_S, NAP_SHARE * passed))
        else:
            stock(condition, timeout_ms)

    condition.record_read, condition.wait = record_read, wait


def answer_untraced(process: Any) -> None:
    """In a rank's process: call what each answer passes through without Ray's wrapping.

    Replaces: `WorkerProc._execute_worker_rpc`, `WorkerProc.handle_output`,
    `WorkerProc.enqueue_output`, by a rank for itself.
    Why: Ray wraps every method of an actor's class, inherited ones too, to resume traces of remote
    calls; these are called here, three for each call of the driver, and mp has no such wrapping.
    Can go when: Ray wraps only what is called from outside.

    Args:
        process: an actor of a class below WorkerProc.

    """
    from vllm.v1.executor.multiproc_executor import WorkerProc

    for name in ("_execute_worker_rpc", "handle_output", "enqueue_output"):
        setattr(process, name, MethodType(original(WorkerProc, name), process))


def answer_if_well(process: Any, problem: Callable[[], Exception | None]) -> None:
    """In a rank's process: answer with an error what was computed while there was a problem.

    Behind `answer_untraced`.

    Replaces: `WorkerProc.enqueue_output`, by a rank for itself.
    Uses: `AsyncModelRunnerOutput.get_output`.
    Why: what a GPU has computed is known only once it has, where vLLM waits for it to answer.
    Can go when: outputs of steps can be checked before they are answered.

    Args:
        process: an actor of a class below WorkerProc.
        problem: asked once a step has been computed; None where all is well.

    """
    from vllm.v1.outputs import AsyncModelRunnerOutput

    class Checked(AsyncModelRunnerOutput):  # type: ignore[misc]
        """An output that is looked at once it is there."""

        def __init__(self, output: Any) -> None:
            self._output = output

        def get_output(self) -> Any:
            output = self._output.get_output()
            if (found := problem()) is not None:
                raise found
            return output

        def get_kv_connector_output(self) -> None:
            """Output of a failed step, which vLLM 0.33 sends in place of the error; that counts."""

    enqueue = original(process, "enqueue_output")

    def enqueue_output(output: Any) -> None:
        if isinstance(output, AsyncModelRunnerOutput):
            enqueue(Checked(output))
        else:
            enqueue(problem() or output)

    process.enqueue_output = enqueue_output


def error_of(answer: Any) -> str:
    """Error that an answer of a rank reports in the place of a result.

    In vLLM 0.33, a rank with a KV connector answers with that one's output, and logs the error.
    """
    return answer if isinstance(answer, str) else "an error that is in the log of the rank"


def answer(process: Any, call: Any) -> None:
    """In a rank's process: carry out one call of the driver, and answer it.

    Uses: `WorkerProc._execute_worker_rpc`.
    """
    process._execute_worker_rpc(call)

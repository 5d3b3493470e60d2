"""What the driver and its ranks say to each other is what vLLM's executor and workers say."""

from __future__ import annotations

import inspect
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from ray.util.tracing.tracing_helper import _inject_tracing_into_class
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.executor.ray_executor_v2 import RayWorkerProc
from vllm.v1.outputs import AsyncModelRunnerOutput

from ray_hetero.compat.worker import message_queues
from ray_hetero.errors import RankError
from ray_hetero.worker.rank_actor import RankActor


def test_a_call_of_the_ranks_says_the_same_as_vllms() -> None:
    """What `rpc.py` sends and takes itself is what vLLM's executor sends and takes."""
    asked: list[Any] = []
    success = WorkerProc.ResponseStatus.SUCCESS
    theirs: Any = MultiprocExecutor.__new__(MultiprocExecutor)
    theirs.is_failed, theirs.futures_queue = False, deque()
    # vLLM 0.33 asks whether it may go on with a part of the answers.
    theirs.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(enable_fault_tolerance=False)
    )
    theirs.rpc_broadcast_mq = SimpleNamespace(enqueue=asked.append)
    theirs.response_mqs = [
        SimpleNamespace(dequeue=lambda timeout, rank=rank: (success, rank)) for rank in range(2)
    ]
    assert theirs.collective_rpc("check", args=(1,), kwargs={"two": 2}) == [0, 1]
    assert theirs.collective_rpc("check", unique_reply_rank=1) == 1
    assert asked == [("check", (1,), {"two": 2}, None), ("check", (), {}, 1)]
    adding = SimpleNamespace(aggregate=lambda outputs, output_rank: (sum(outputs), output_rank))
    found = theirs.collective_rpc("check", unique_reply_rank=1, kv_output_aggregator=adding)
    assert found == (1, 1)
    theirs.collective_rpc(len)
    assert cloudpickle.loads(asked[-1][0]) is len
    theirs.response_mqs[0].dequeue = lambda timeout: (WorkerProc.ResponseStatus.FAILURE, "why")
    with pytest.raises(RuntimeError, match="why"):
        theirs.collective_rpc("check")


def test_a_rank_takes_a_call_as_it_is_sent() -> None:
    rank: Any = WorkerProc.__new__(WorkerProc)
    answers: list[Any] = []
    rank.rank, rank.worker = 1, SimpleNamespace(double=lambda number, more=0: 2 * number + more)
    rank.handle_output = answers.append
    message_queues.answer(rank, ("double", (3,), {"more": 1}, None))
    message_queues.answer(rank, ("double", (3,), {}, 0))
    message_queues.answer(rank, (cloudpickle.dumps(lambda worker: worker.double(5)), (), {}, 1))
    assert answers == [7, 10]


def test_the_creator_of_a_ring_buffer_unlinks_it_once() -> None:

    queue = MessageQueue(n_reader=1, n_local_reader=1)
    path = Path("/dev/shm") / queue.buffer.shared_memory.name
    assert path.exists()
    message_queues.unlink_once_attached(queue)
    assert not path.exists()
    sockets = [
        Path(address.removeprefix("ipc://"))
        for address in (queue.handle.local_subscribe_addr, queue.handle.local_notify_addr)
    ]
    assert all(socket.is_socket() for socket in sockets)
    message_queues.unlink_sockets(queue)
    message_queues.unlink_sockets(queue)
    assert not any(socket.exists() for socket in sockets)
    # The second call, and the collection of the queue, find nothing to do and say nothing.
    queue.buffer.is_creator = False
    queue.shutdown()


def test_answers_do_not_pass_through_rays_tracing() -> None:
    class Actor(RayWorkerProc):  # type: ignore[misc]
        pass

    _inject_tracing_into_class(Actor)
    process, frames = Actor.__new__(Actor), []

    def enqueue(answer: Any) -> None:
        assert answer == (WorkerProc.ResponseStatus.SUCCESS, "well")
        frames.append([frame.function for frame in inspect.stack()])

    process.rank, process.use_async_scheduling = 0, False
    process.worker = SimpleNamespace(check_health=lambda: "well")
    process.worker_response_mq = SimpleNamespace(enqueue=enqueue)
    message_queues.answer(process, ("check_health", (), {}, None))
    message_queues.answer_untraced(process)
    message_queues.answer(process, ("check_health", (), {}, None))
    traced, untraced = frames
    assert traced.count("_resume_span") == 3
    assert "_resume_span" not in untraced


def test_what_was_computed_while_there_was_a_problem_is_no_answer() -> None:
    class Async(AsyncModelRunnerOutput):  # type: ignore[misc]
        def get_output(self) -> str:
            return "tokens"

        def get_kv_connector_output(self) -> None:
            """Vllm 0.33 asks for it where the other one fails."""

    process, problems, answers = RankActor.__new__(RankActor), list[Exception](), list[Any]()
    process.worker_response_mq = SimpleNamespace(enqueue=answers.append)
    message_queues.answer_untraced(process)
    message_queues.answer_if_well(process, lambda: problems[0] if problems else None)
    for output in ("tokens", Async()):
        process.enqueue_output(output)
    problems.append(RankError("rank 2 has ended"))
    for output in ("tokens", Async()):
        process.enqueue_output(output)
    done, failed = WorkerProc.ResponseStatus.SUCCESS, WorkerProc.ResponseStatus.FAILURE
    assert answers == [(done, "tokens")] * 2 + [(failed, "rank 2 has ended")] * 2

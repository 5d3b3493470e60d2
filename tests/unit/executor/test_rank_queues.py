"""No wait for a rank outlives that rank; over vLLM's own message queues."""

from __future__ import annotations

import threading
import time

import pytest
import torch  # noqa: F401  (the ring buffer maps its memory as a tensor)
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from ray_hetero.errors import RankError, StartupError
from ray_hetero.executor.failure import Failure
from ray_hetero.executor.rank_queues import AnswerQueue, RequestQueue, wait_until_ready

CHUNKS = 10
"""Messages that vLLM's ring buffer holds."""


class Pair:
    """A queue to one rank and a queue back, both ends in this process."""

    def __init__(self, *, shares_cores: bool = False) -> None:
        self.failure = Failure()
        self.requests = RequestQueue(1, 1)
        self.requests.failure, self.requests.limit_s = self.failure, 60.0
        self.taken = MessageQueue.create_from_handle(self.requests.export_handle(), 0)
        self.given = MessageQueue(1, 1)
        self.answers = AnswerQueue.open(
            self.given.export_handle(), self.failure, shares_cores=shares_cores
        )


@pytest.fixture(params=[False, True], ids=["polls", "naps"])
def pair(request: pytest.FixtureRequest) -> Pair:
    made = Pair(shares_cores=request.param)
    rank = threading.Thread(
        target=lambda: (made.taken.wait_until_ready(), made.given.wait_until_ready())
    )
    rank.start()
    wait_until_ready([made.requests, made.answers], made.failure, 30, "startup.actor_timeout_s")
    rank.join()
    return made


def _told_later(failure: Failure) -> threading.Thread:
    teller = threading.Timer(0.2, failure.tell, ("rank 1 died",))
    teller.start()
    return teller


def test_messages_go_through(pair: Pair) -> None:
    pair.requests.enqueue(("step", 1))
    assert pair.taken.dequeue(timeout=10) == ("step", 1)
    pair.given.enqueue("done")
    assert pair.answers.dequeue(timeout=10) == "done"


@pytest.mark.parametrize("pair", [True], indirect=True)
def test_an_engine_that_shares_its_cores_with_ranks_sleeps_while_it_waits(pair: Pair) -> None:
    pair.given.enqueue("done")
    assert pair.answers.dequeue(timeout=10) == "done"
    begin = time.thread_time()
    with pytest.raises(TimeoutError):
        pair.answers.dequeue(timeout=0.6)
    assert time.thread_time() - begin < 0.3


def test_a_wait_for_an_answer_has_its_limit_and_ends_with_the_rank(pair: Pair) -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        pair.answers.dequeue(timeout=0.7)
    assert time.monotonic() - start > 0.6
    _told_later(pair.failure)
    with pytest.raises(RankError, match="rank 1 died"):
        pair.answers.dequeue()


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_rank_that_takes_nothing_does_not_hold_up_the_engine(pair: Pair, is_dead: bool) -> None:
    for number in range(CHUNKS):
        pair.requests.enqueue(number)
    if is_dead:
        _told_later(pair.failure)
    with pytest.raises(RankError if is_dead else TimeoutError):
        pair.requests.enqueue("one more", timeout=30 if is_dead else 0.2)
    # What did not fit is not half in the queue.
    assert [pair.taken.dequeue(timeout=10) for _ in range(CHUNKS)] == list(range(CHUNKS))


def test_a_rank_that_never_connects_is_not_waited_for_for_ever() -> None:
    requests, failure = RequestQueue(1, 1), Failure()
    with pytest.raises(StartupError, match=r"did not connect .* in 0\.3 s \(the\.key\)"):
        wait_until_ready([requests], failure, 0.3, "the.key")
    _told_later(failure)
    with pytest.raises(RankError, match="rank 1 died"):
        wait_until_ready([requests], failure, 30, "the.key")


def test_a_queue_that_raises_is_not_ready() -> None:
    class Strange:
        def wait_until_ready(self) -> None:
            raise OSError("no such socket")

    with pytest.raises(StartupError, match=r"did not open: .* OSError\('no such socket'\)"):
        wait_until_ready([Strange()], Failure(), 30, "the.key")


def test_a_wait_for_a_queue_that_is_shut_down_says_what_ended_the_ranks(pair: Pair) -> None:
    def shut_down() -> None:
        pair.failure.tell("rank 1 died")
        pair.answers.shutdown()

    threading.Timer(0.2, shut_down).start()
    with pytest.raises(RankError, match="rank 1 died"):
        pair.answers.dequeue(10)

"""Ranks without processes: queues that hold answers, and actors that end when they are told to."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.executor.multiproc_executor import WorkerProc
from worlds import layout, world

from ray_hetero.executor.failure import Ending
from ray_hetero.executor.rank_set import RankSet

DONE, FAILED = WorkerProc.ResponseStatus.SUCCESS, WorkerProc.ResponseStatus.FAILURE


class Answers:
    """A rank that gives the answers it was made with, and then none."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.waits = deque(answers), list[float]()
        self.is_shut_down = False

    def dequeue(self, timeout: float | None = None) -> Any:
        assert timeout is not None
        self.waits.append(timeout)
        if not self.answers:
            raise TimeoutError
        return self.answers.popleft()

    def wait_until_ready(self) -> None: ...

    def shutdown(self) -> None:
        self.is_shut_down = True


class Requests:
    """The queue that all ranks read."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.is_shut_down = False

    def enqueue(self, obj: Any) -> None:
        self.asked.append(obj)

    def wait_until_ready(self) -> None: ...

    def unlink(self) -> None: ...

    def unlink_sockets(self) -> None: ...

    def shutdown(self) -> None:
        self.is_shut_down = True


class Actors:
    """Actors that serve until `kill` says that they have ended, or they are asked to end."""

    processes = None
    seconds = ()

    def __init__(self) -> None:
        self.ends = 0
        self._endings: list[Ending] = []
        self._one_has_ended = threading.Event()

    def kill(self, *endings: Ending) -> None:
        """Ranks end by themselves."""
        self._endings += endings
        self._one_has_ended.set()

    def start(self, requests: Any) -> Sequence[Any]:
        return ()

    def run(self) -> None: ...

    def ended(self, at_least: int, timeout_s: float) -> Sequence[Ending]:
        self._one_has_ended.wait(0.02)
        return self._endings

    def report(self, endings: Sequence[Ending]) -> str:
        return "; ".join(f"rank {ending.rank} {ending.text}" for ending in endings)

    def end(self) -> None:
        self.ends += 1


def rank_set(
    *ranks: Answers,
    experts: int = 0,
    actors: Actors | None = None,
    on_failure: Callable[[str], object] = lambda report: None,
    on_stopped: Callable[[], object] = lambda: None,
) -> RankSet:
    """CPU ranks that serve, one a queue of answers, and expert ranks, which have none."""
    there = world("c" * (len(ranks) + experts))
    seats, others = there.seats[: len(ranks)], there.seats[len(ranks) :]
    others = tuple(replace(seat, serves_experts=True) for seat in others)
    there = replace(there, layout=layout("c" * len(ranks)), seats=seats, experts=others)
    made = RankSet(there, actors or Actors(), on_failure, on_stopped)
    made.connect(Requests(), ranks, 10, "the.key")
    return made

"""Every answer of every call is read and taken for that call; a closed set ends nobody else's."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from fake_ranks import DONE, FAILED, Actors, Answers, rank_set

from ray_hetero.errors import RankError, StartupError
from ray_hetero.executor.failure import Ending, Severity
from ray_hetero.executor.rank_set import CLOSED, NOBODY, Call, RankSet
from ray_hetero.worker.warmup_schedule import Action, Step

DIED = Ending(0, Severity.DIED, "died")


def call(method: str, answering: int | None = None, limit_s: float = 5, step: int | None = None):
    return Call(method, (), {}, answering, step, limit_s, "")


def ask(ranks: RankSet, method: str, answering: int | None = None, **options: Any) -> list[Any]:
    made = call(method, answering, **options)
    ranks.send(made)
    return ranks.answers(made)


def test_an_error_of_all_ranks_is_told_once_and_no_answer_stays_for_the_next_call() -> None:
    both = [(FAILED, "no such adapter"), (DONE, "tokens")]
    ranks = rank_set(Answers(both[0]), Answers(*both))
    expected = r"rank 0 \(.*\) and rank 1 \(.*\) failed with: no such adapter$"
    with pytest.raises(RuntimeError, match=expected):
        ask(ranks, "add_lora")
    assert ask(ranks, "execute_model", answering=1, step=1) == ["tokens"]
    assert not ranks.is_failed


def test_the_answers_of_others_are_read_when_one_rank_fails() -> None:
    ranks = rank_set(
        Answers((FAILED, "no room"), (DONE, "a")), Answers((DONE, "stale"), (DONE, "b"))
    )
    with pytest.raises(RuntimeError, match=r"^rank 0 \([^;]*failed with: no room$"):
        ask(ranks, "first")
    assert ask(ranks, "second") == ["a", "b"]


def test_an_answer_that_came_too_late_is_dropped() -> None:
    slow, quick = Answers(), Answers((DONE, 1), (DONE, 2))
    ranks = rank_set(slow, quick)
    with pytest.raises(TimeoutError, match=r"^first was not done in 0\.1 s$"):
        ask(ranks, "first", limit_s=0.1)
    slow.answers.extend([(DONE, "late"), (DONE, "in time")])
    assert ask(ranks, "second") == ["in time", 2]


def test_of_a_call_that_one_rank_answers_only_that_rank_owes_an_answer() -> None:
    ranks = rank_set(Answers((DONE, "all 0")), Answers((DONE, "one"), (DONE, "all 1")))
    assert ask(ranks, "step", answering=1) == ["one"]
    assert ask(ranks, "everyone") == ["all 0", "all 1"]


def test_a_call_in_flight_keeps_its_answers_when_the_next_one_is_sent() -> None:
    ranks = rank_set(Answers((DONE, 1), (DONE, 2)))
    first, second = call("first"), call("second")
    ranks.send(first)
    ranks.send(second)
    assert (first.number, second.number) == (1, 2)
    assert ranks.answers(first) == [1]
    assert ranks.answers(second) == [2]


def test_what_the_ranks_are_told_is_not_answered() -> None:
    ranks = rank_set(Answers((DONE, 1), (DONE, 2)))
    first, second = call("first"), call("second")
    ranks.send(first)
    ranks.send(second)
    assert ranks.answers(first) == [1]
    ranks.tell("hear", "news")
    assert ranks.answers(second) == [2]
    requests: Any = ranks._requests
    assert requests.asked[2] == ("hear", ("news",), {}, NOBODY)
    assert NOBODY not in range(len(ranks.world.seats))


def test_a_step_that_waits_for_the_one_before_has_its_time_from_there() -> None:
    rank = Answers((DONE, 1), (DONE, 2), (DONE, 3))
    ranks = rank_set(rank)
    first, second = call("first", limit_s=5, step=1), call("second", limit_s=5, step=2)
    other = call("other", limit_s=5)
    for one in (first, second, other):
        ranks.send(one)
    for one in (second, other):
        # As if the first step had taken three seconds.
        one.deadline -= 3
    ranks.answers(first)
    ranks.answers(second)
    ranks.answers(other)
    assert rank.waits[1] == pytest.approx(5, abs=0.5)
    assert rank.waits[2] == pytest.approx(2, abs=0.5)


def test_steps_of_the_warm_up_are_not_answered_by_what_came_before() -> None:
    late = Answers()
    ranks = rank_set(late)
    with pytest.raises(TimeoutError):
        ask(ranks, "first", limit_s=0.1)
    late.answers.extend([(DONE, "late"), (DONE, "step 1"), (FAILED, "no kernel")])
    steps = [Step(number, Action.FORWARD, 8) for number in (1, 2)]
    ranks.send_steps([steps])
    assert ranks.next_answer(0, 1) == "step 1"
    ranks.verdict = lambda: None  # type: ignore[method-assign]
    with pytest.raises(RankError, match=r"warm-up: rank 0 \(.*\) failed: no kernel"):
        ranks.next_answer(0, 1)


def test_a_rank_that_ends_is_reported_once_and_the_others_are_stopped() -> None:
    actors, told = Actors(), list[str]()
    stopped = threading.Event()
    ranks = rank_set(Answers(), actors=actors, on_failure=told.append, on_stopped=stopped.set)
    actors.kill(DIED)
    assert stopped.wait(10)
    assert told == ["rank 0 died"]
    assert actors.ends == 1
    assert ranks.verdict() == "rank 0 died"
    assert str(ranks.fail("rank 1 lost its peer")) == "rank 0 died"
    with pytest.raises(RankError, match="rank 0 died"):
        ask(ranks, "next")


def test_an_expert_rank_gives_no_answers_and_its_end_is_everyones() -> None:
    actors, told = Actors(), list[str]()
    ranks = rank_set(Answers((DONE, 1)), experts=2, actors=actors, on_failure=told.append)
    assert ask(ranks, "everyone") == [1]
    assert ranks.world.describe(2).startswith("rank 2 (experts, socket 2")
    actors.kill(Ending(2, Severity.DIED, "died"))
    assert ranks.verdict() == "rank 2 died"
    with pytest.raises(RankError, match="rank 2 died"):
        ask(ranks, "next")


def test_the_watch_of_a_closed_set_ends_nobody() -> None:
    slow = threading.Event()

    class SlowActors(Actors):
        """Actors whose report takes longer than anybody waits for the watch."""

        def report(self, endings: Sequence[Ending]) -> str:
            slow.wait(10)
            return super().report(endings)

    told: list[str] = []
    actors = SlowActors()
    old = rank_set(Answers(), actors=actors, on_failure=told.append)
    actors.kill(DIED)
    watch = old._watch
    assert watch is not None
    watch.stop = watch.join = lambda: None  # type: ignore[method-assign]
    old.close()
    new = rank_set(Answers((DONE, "new")), on_failure=told.append)
    slow.set()
    watch._thread.join(10)
    assert not watch._thread.is_alive()
    # Once by close, and not again by the watch.
    assert actors.ends == 1
    assert told == []
    assert ask(new, "step") == ["new"]


def test_a_set_that_was_closed_while_it_failed_does_not_stop_the_engine() -> None:
    stops: list[str] = []
    ranks = rank_set(
        Answers(),
        on_failure=lambda report: ranks.close(),
        on_stopped=lambda: stops.append("engine"),
    )
    ranks.fail("rank 0 died")
    assert stops == []


def test_a_closed_set_takes_no_calls_and_its_queues_are_shut_down() -> None:
    actors, answers, told = Actors(), Answers(), list[str]()
    ranks = rank_set(answers, actors=actors, on_failure=told.append)
    requests: Any = ranks._requests
    under_way = call("under way")
    ranks.send(under_way)
    ranks.close()
    ranks.close()
    assert actors.ends == 2
    assert answers.is_shut_down
    assert requests.is_shut_down
    with pytest.raises(RankError, match=CLOSED):
        ask(ranks, "step")
    with pytest.raises(RankError, match=CLOSED):
        ranks.answers(under_way)
    assert told == []


def test_a_queue_that_does_not_open_is_no_ready_queue() -> None:
    class Strange(Answers):
        def wait_until_ready(self) -> None:
            raise OSError("no such socket")

    with pytest.raises(StartupError, match=r"did not open: .*no such socket"):
        rank_set(Strange())

"""A rank carries out its calls in their order, also those that it has looked behind."""

from __future__ import annotations

from collections import deque

from ray_hetero.worker.driver_calls import Call, DriverCalls


class Waiting:
    """A queue that has these calls."""

    def __init__(self, *methods: str) -> None:
        self.calls = deque[Call]((method, (at,), {}, None) for at, method in enumerate(methods))

    def dequeue(self, *, indefinite: bool) -> Call:
        assert indefinite
        return self.calls.popleft()


def test_a_call_that_is_looked_for_leaves_the_others_in_their_order() -> None:
    queue = Waiting("sample", "hear", "step", "hear", "stop")
    calls = DriverCalls(queue)
    assert calls.next_of("hear")[1] == (1,)
    assert calls.next_of("hear")[1] == (3,)
    assert [calls.next()[0] for _ in range(3)] == ["sample", "step", "stop"]
    assert not queue.calls


def test_a_call_that_was_kept_is_found() -> None:
    calls = DriverCalls(Waiting("sample", "step", "hear", "stop"))
    assert calls.next_of("hear")[1] == (2,)
    assert calls.next_of("step")[1] == (1,)
    assert [calls.next()[0] for _ in range(2)] == ["sample", "stop"]

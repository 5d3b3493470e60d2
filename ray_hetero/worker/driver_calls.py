"""Calls of the driver, as a rank takes them from its queue."""

from __future__ import annotations

from collections import deque
from typing import Any

Call = tuple[Any, tuple[Any, ...], dict[str, Any], int | None]
"""Method, its arguments, and the rank that answers: what vLLM's `_execute_worker_rpc` takes."""


TELL_TOKENS = "take_sampled_tokens"
"""Call that tells the ranks the tokens of a step, where steps are scheduled ahead; nobody answers
it."""


class DriverCalls:
    """Calls that a rank has yet to carry out, in their order.

    Waits have no limit of their own: the driver ends a rank whose call is late, and a rank ends
    with its driver.

    Args:
        queue: the rank's end of the driver's queue, vLLM's `MessageQueue`.

    """

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._kept: deque[Call] = deque()

    def next(self) -> Call:
        """Wait for the next call."""
        return self._kept.popleft() if self._kept else self._take()

    def next_of(self, method: str) -> Call:
        """Wait for the next call of one method; others that come before it are kept for `next`."""
        for call in self._kept:
            if call[0] == method:
                self._kept.remove(call)
                return call
        while (call := self._take())[0] != method:
            self._kept.append(call)
        return call

    def _take(self) -> Call:
        call: Call = self._queue.dequeue(indefinite=True)
        return call

"""Events of a CPU rank's steps (ray_hetero/kernels/step_trace.py), kept in their order."""

from __future__ import annotations

from typing import Any

from ray_hetero.kernels.step_trace import Event


class StepTrace:
    """A follower that keeps events in their order."""

    def __init__(self) -> None:
        self._events: list[tuple[Event, tuple[Any, ...]]] = []

    def __call__(self, event: Event, *values: Any) -> None:
        """Keep an event."""
        self._events.append((event, values))

    def of(self, kind: Event) -> list[tuple[Any, ...]]:
        """Values of each event of one kind."""
        return [values for event, values in self._events if event is kind]

    def clear(self) -> None:
        """Forget all events."""
        self._events.clear()

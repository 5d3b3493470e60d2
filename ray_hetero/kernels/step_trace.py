"""Trace of a CPU rank's steps: routes, layers, pieces of weights, graphs, words and messages.

Nobody follows the steps of an engine, and an event then costs a call that does nothing.  Whoever
has to know what a step did gives a function that takes the events as they happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any


class Event(StrEnum):
    """Kinds of events, each with the values that belong to it."""

    ROUTE = "route"
    """`StepRoute` that layers compute a step by."""
    INSTEAD = "instead"
    """`Reason` for which layers leave it."""
    LAYERS = "layers"
    """Layers of one call; their tokens in native calls, on a GPU and by single operators."""
    SHARE = "share"
    """Parts of every MLP that a GPU computes of a decode step; 0 where the cores compute all."""
    COPY = "copy"
    """`Piece` of weights whose copy to a GPU is submitted, or captured into a CUDA graph.  A graph
    that is replayed repeats its copies and words, which are no events then."""
    GRAPH = "graph"
    """Act ("captured", "replayed") and `StepKind` of a decode step's work on a GPU."""
    WORD = "word"
    """Act ("write", "wait"), name and number of a word of a GPU's stream."""
    MESSAGE = "message"
    """Sender and contents of a message between ranks around a step."""


Follower = Callable[..., None]
"""Function that takes an `Event` and its values, on the thread on which it happens."""

_followers: list[Follower] = []


def note(event: Event, *values: Any) -> None:
    """Tell whoever follows the steps of this process that something has happened."""
    for follower in _followers:
        follower(event, *values)


@contextmanager
def followed(follower: Follower) -> Iterator[None]:
    """Let a function have all events of this process while a context lasts."""
    _followers.append(follower)
    try:
        yield
    finally:
        _followers.remove(follower)

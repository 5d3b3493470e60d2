"""Work of a GPU's stream that is ordered once and repeated in one call, as a CUDA graph.

Ordering an operation takes a core some microseconds, and that of a step's hundreds some tens of
milliseconds; a graph of them is launched in a fraction of one.

This module needs PyTorch, not vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ray_hetero.errors import UnsupportedError

_MODE = "thread_local"
"""Other threads may go on: what they order on streams of their own is not captured."""


class Graph(Protocol):
    """Work that can be repeated."""

    def replay(self) -> None:
        """Order all of it on the current stream."""


class _Again:
    """The same where the CPU takes the place of a GPU: the thread that orders work does it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


def captured(work: Callable[[], None], device: torch.device, beside: Graph | None = None) -> Graph:
    """Work as a graph, which is not done by this.

    Args:
        work: orders operations on the current stream, and on others that wait for events of it and
            that it waits for at the end.
        device: the GPU; for tests the CPU.
        beside: a graph that is never at work at the same time, whose memory for intermediate
            results this one may use too.

    Raises:
        UnsupportedError: CUDA cannot capture some of it.

    """
    if device.type != "cuda":
        return _Again(work)
    graph: Any = torch.cuda.CUDAGraph()
    try:
        pool = beside.pool() if isinstance(beside, torch.cuda.CUDAGraph) else None
        graph.capture_begin(pool=pool, capture_error_mode=_MODE)
        try:
            work()
        finally:
            graph.capture_end()
    except RuntimeError as error:
        raise UnsupportedError((str(error).splitlines() or [repr(error)])[0]) from None
    made: Graph = graph
    return made

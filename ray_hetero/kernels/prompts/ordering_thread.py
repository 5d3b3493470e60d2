"""The thread that orders a GPU's work beside the main one, and what it does ahead of a call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from ray_hetero.runtime.core_binding import compute_alone

LIMIT_S = 600.0
"""Longest wait for the thread that orders work beside the main one."""
SWITCH_S = 1e-4
"""Seconds after which one Python thread of this process makes room for another.  With Python's own
5 ms, the thread that orders a prompt's work began 1 to 3 ms after it was told, because the main one
prepared the step."""


class OrderingThread:
    """What one thread orders of a GPU's work, one thing after the other.

    Args:
        device: the GPU.
        cores: logical CPUs for the thread; without any, those of the thread that makes this.

    """

    def __init__(self, device: torch.device, cores: Collection[int] = ()) -> None:
        self._ordering = ThreadPoolExecutor(
            1, thread_name_prefix="GpuPrefill", initializer=_begin_thread,
            initargs=(device, cores),
        )  # fmt: skip
        self._ordered: Future[None] | None = None
        """Expansion of weights ahead, or a shortage that the next call learns of; else None."""

    def order(self, work: Callable[[], Any]) -> Future[Any]:
        """Have the GPU's work ordered beside this thread."""
        return self._ordering.submit(work)

    def order_ahead(self, work: Callable[[], None]) -> None:
        """Have work ordered that nobody waits for before `settle`."""
        self._ordered = self.order(work)

    @property
    def has_failed(self) -> bool:
        """Whether what was ordered ahead has ended with an error, of which nobody has learnt."""
        return (
            self._ordered is not None
            and self._ordered.done()
            and (self._ordered.exception() is not None)
        )

    @property
    def is_settled(self) -> bool:
        """Whether `settle` would not wait."""
        return self._ordered is None or self._ordered.done()

    def settle(self) -> None:
        """Wait until the other thread has ordered everything.

        Raises:
            RuntimeError: what CUDA has said there.
            TimeoutError: it takes too long.

        """
        ordered, self._ordered = self._ordered, None
        if ordered is not None:
            ordered.result(timeout=LIMIT_S)

    @contextmanager
    def leaving_shortage(self) -> Iterator[None]:
        """Leave it to the next call of what is computed here that memory has run out.

        That call has somebody to go on without the GPU, and other ranks of a group come to it.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            self._ordered = Future()
            self._ordered.set_exception(error)


def _begin_thread(device: torch.device, cores: Collection[int]) -> None:
    compute_alone(cores)
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
    if device.type == "cuda":
        torch.cuda.set_device(device)

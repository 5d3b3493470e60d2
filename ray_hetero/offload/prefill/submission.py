"""The thread that submits a GPU's work beside the main one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from ray_hetero.runtime.core_binding import compute_alone

LIMIT_S = 600.0
"""Longest wait for work that the thread submits, in seconds."""
SWITCH_S = 1e-4
"""Seconds after which one Python thread of this process makes room for another.  With Python's own
5 ms, the thread that orders a prompt's work began 1 to 3 ms after it was told, because the main one
prepared the step."""


class SubmissionThread:
    """Thread that submits a GPU's work, one call after the other.

    Args:
        device: the GPU.
        cores: logical CPUs for the thread; without any, those of the thread that makes this.

    """

    def __init__(self, device: torch.device, cores: Collection[int] = ()) -> None:
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="OffloadGpu", initializer=_begin_thread,
            initargs=(device, cores),
        )  # fmt: skip
        self._shortage: torch.OutOfMemoryError | None = None
        """Shortage that the next call learns of."""

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Submit the GPU's work on that thread."""
        return self._thread.submit(work)

    def settle(self) -> None:
        """Learn of a shortage that was left to this call.

        Raises:
            torch.OutOfMemoryError: memory has run out.

        """
        shortage, self._shortage = self._shortage, None
        if shortage is not None:
            raise shortage

    @contextmanager
    def leaving_shortage(self) -> Iterator[None]:
        """Leave it to the next call of what is computed here that memory has run out.

        That call has somebody to go on without the GPU, and other ranks of a group come to it.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            self._shortage = error


def _begin_thread(device: torch.device, cores: Collection[int]) -> None:
    compute_alone(cores)
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
    if device.type == "cuda":
        torch.cuda.set_device(device)

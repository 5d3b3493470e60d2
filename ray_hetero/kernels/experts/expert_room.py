"""Memory for all weights of a layer of experts: gate and up of each one after the other, then down
of each.

Neighbouring experts are neighbours in memory, so that a GPU copies many of them at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import torch

from ray_hetero.kernels.formats import HostWeight
from ray_hetero.log import logger
from ray_hetero.runtime.shared_pages import LONG_STEP, STEP, SharedPages

LINE = 64
"""Bytes of a cache line; weights begin with one."""


def in_lines(nbytes: int) -> int:
    """Bytes that a weight takes: whole cache lines."""
    return -(-nbytes // LINE) * LINE


class Room:
    """Private memory, one piece, which huge pages can back.

    Args:
        sizes: most bytes of all gates and ups, and of all downs.

    """

    pages: SharedPages | None = None
    """Pages through which other processes map the memory; None if it is private."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        self._begin(torch.empty(sum(sizes), dtype=torch.uint8), (0, sizes[0]))

    def _begin(self, memory: torch.Tensor, starts: tuple[int, int]) -> None:
        self._memory = memory
        self.starts = starts
        """Offset in bytes of each half."""
        self._ends = list(starts)

    @property
    def used(self) -> tuple[int, int]:
        """Bytes of each half that weights have taken."""
        left, right = (end - start for start, end in zip(self.starts, self._ends, strict=True))
        return left, right

    def moved(self, weight: HostWeight, half: int) -> HostWeight:
        """The weight, with its data behind the others of its half."""
        data = weight.data
        place = self.taken(data.nbytes, half).view(data.dtype).view(data.shape)
        return replace(weight, data=place.copy_(data))

    def taken(self, nbytes: int, half: int) -> torch.Tensor:
        """Memory behind the weights of a half, for one more: uint8, [bytes]."""
        begin = self._ends[half]
        self._ends[half] = end = begin + in_lines(nbytes)
        self._take(begin, end, half)
        return self._memory[begin : begin + nbytes]

    def expect(self, sizes: tuple[int, int]) -> None:
        """Know how many bytes of each half weights are expected to take, to provide more at once.

        Args:
            sizes: of both halves, in whole cache lines.

        """

    def provide(self, half: int, nbytes: int, submit: Submit) -> None:
        """Let threads provide memory for so many bytes of a half, unless they do so already.

        Args:
            half: 0 or 1.
            nbytes: from its beginning on, as far as they are expected.
            submit: has a thread call a function.

        """

    def wait(self, place: torch.Tensor) -> None:
        """Wait until threads have provided a place."""

    def half(self, half: int) -> torch.Tensor:
        """Memory that weights of a half have taken: uint8, [bytes]."""
        return self._memory[self.starts[half] : self._ends[half]]

    def _take(self, begin: int, end: int, half: int) -> None:
        """Provide memory for these bytes."""


class _Step:
    """Memory that the first thread to come prepares, while others wait for that.

    Args:
        pages: of the memory.
        begin: first byte.
        end: the one behind the last.

    """

    def __init__(self, pages: SharedPages, begin: int, end: int) -> None:
        self._pages = pages
        self.begin, self.end = begin, end
        self._is_ready = False
        self._preparing = threading.Lock()

    def take(self) -> None:
        """Prepare the memory, unless it is."""
        with self._preparing:
            if not self._is_ready:
                self._pages.prepare(self.begin, self.end)
                self._is_ready = True


class SharedRoom(Room):
    """Memory that other processes map.

    Args:
        sizes: as for `Room`.

    Raises:
        OSError: the system gives none.

    """

    pages: SharedPages

    def __init__(self, sizes: tuple[int, int]) -> None:
        left, right = (-(-size // STEP) * STEP for size in sizes)
        self.pages = SharedPages.made(left + right, "ray_hetero-weights")
        self._begin(self.pages.memory, (0, left))
        self._prepared = [0, left]
        self._expected = [0, left]
        self._steps: list[_Step] = []
        # Nothing is prepared twice: that writes where weights may be by then.
        self._claiming = threading.Lock()

    def expect(self, sizes: tuple[int, int]) -> None:
        """See `Room`; pages up to there are made in long steps."""
        self._expected = [start + size for start, size in zip(self.starts, sizes, strict=True)]

    def provide(self, half: int, nbytes: int, submit: Submit) -> None:
        """See `Room`."""
        wanted = min(self.starts[half] + nbytes, self._expected[half])
        with self._claiming:
            while (begin := self._prepared[half]) < wanted:
                end = -(-min(begin + LONG_STEP, self._expected[half]) // STEP) * STEP
                self._prepared[half] = end
                step = _Step(self.pages, begin, end)
                self._steps.append(step)
                submit(step.take)

    def wait(self, place: torch.Tensor) -> None:
        """See `Room`."""
        first = place.data_ptr() - self._memory.data_ptr()
        for step in self._steps:
            if step.begin < first + place.nbytes and first < step.end:
                # All threads may be here, for steps that are queued behind what they do.
                step.take()

    def _take(self, begin: int, end: int, half: int) -> None:
        with self._claiming:
            prepared = self._prepared[half]
            more = min(prepared + LONG_STEP, self._expected[half])
            to = -(-max(end, more) // STEP) * STEP if end > prepared else prepared
            self._prepared[half] = to
        if to > prepared:
            self.pages.prepare(prepared, to)


def room_to_share(sizes: tuple[int, int]) -> Room:
    """Memory that other processes map, or private memory where the system gives none."""
    try:
        return SharedRoom(sizes)
    except OSError as error:
        logger.warning("no GPU can read a layer's experts in prompts: %s", error)
        return Room(sizes)


Submit = Callable[..., Future[None]]
MakeRoom = Callable[[tuple[int, int]], Room]

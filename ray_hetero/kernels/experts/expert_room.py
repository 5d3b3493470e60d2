"""Memory for all weights of a layer of experts: gate and up of each one after the other, then down
of each.

Neighbouring experts are neighbours in memory, so that a GPU copies many of them at once.
"""

from __future__ import annotations

from collections.abc import Callable
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

    def take_all(self) -> None:
        """Take all memory at once, where weights are sure to fill it."""

    def _take(self, begin: int, end: int, half: int) -> None:
        """Provide memory for these bytes."""


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

    def take_all(self) -> None:
        """Take all pages, in longer steps than as weights come."""
        end, total = self.starts[1], len(self.pages.memory)
        for begin in range(0, total, LONG_STEP):
            self.pages.prepare(begin, min(begin + LONG_STEP, total))
        self._prepared = [end, total]

    def _take(self, begin: int, end: int, half: int) -> None:
        if end > (prepared := self._prepared[half]):
            self._prepared[half] = -(-end // STEP) * STEP
            self.pages.prepare(prepared, self._prepared[half])


def room_to_share(sizes: tuple[int, int]) -> Room:
    """Memory that other processes map, or private memory where the system gives none."""
    try:
        return SharedRoom(sizes)
    except OSError as error:
        logger.warning("no GPU can read a layer's experts in prompts: %s", error)
        return Room(sizes)


MakeRoom = Callable[[tuple[int, int]], Room]

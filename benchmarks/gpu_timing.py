"""Medians of what a GPU is asked to do, and readers of weights without their copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ray_hetero.offload.weights.link_reader import LinkReader


def milliseconds(work: Callable[[], Any], repeats: int) -> float:
    """Median of so many."""
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return round(statistics.median(times[2:]), 2)


def copied(reader: LinkReader[Any], pieces: Iterable[Any]) -> None:
    """Copy pieces with a reader, and compute nothing with them."""
    for piece in pieces:
        reader.forget()
        reader.fetch(piece)
    reader.forget()


@contextmanager
def without_copies(reader: LinkReader[Any]) -> Iterator[None]:
    """Let a reader copy nothing, so that products use whatever its memory holds."""
    copies = reader.copies
    reader.copies = lambda piece: iter(())  # type: ignore[method-assign]
    reader.forget()
    try:
        yield
    finally:
        reader.copies = copies  # type: ignore[method-assign]
        reader.forget()

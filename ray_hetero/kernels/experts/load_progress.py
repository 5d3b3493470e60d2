"""Lines in the log while the experts of many layers are brought into the order of the kernel."""

from __future__ import annotations

import threading
import time

from placement.units import GIB
from ray_hetero.log import logger

INTERVAL_S = 10.0
"""Seconds between two lines."""


class LoadProgress:
    """Progress of a rank; its methods may be called from any thread.

    Args:
        layers: that there are.
        nbytes: of their files; None where they are not counted while they are read.

    """

    def __init__(self, layers: int, nbytes: int | None = None) -> None:
        self._layers = layers
        self._nbytes = nbytes
        self._ready, self._bytes = 0, 0
        self._lock = threading.Lock()
        self._began = self._said = time.monotonic()

    def add(self, nbytes: int) -> None:
        """Count a layer of so many bytes, and say how far it is if that was long ago."""
        with self._lock:
            self._ready += 1
            if self._nbytes is None:
                self._bytes += nbytes
            self._say()

    def read(self, nbytes: int) -> None:
        """Count so many bytes of the files, and say how far it is if that was long ago."""
        with self._lock:
            self._bytes += nbytes
            self._say()

    def _say(self) -> None:
        now = time.monotonic()
        is_more_to_come = self._ready < self._layers and (self._nbytes or self._ready)
        if now - self._said >= INTERVAL_S and is_more_to_come:
            self._said = now
            logger.info("%s", self.described(now - self._began))

    def described(self, seconds: float) -> str:
        """Progress after so many seconds, of at least one layer or one byte."""
        rate = self._bytes / seconds
        done = f"{self._bytes / GIB:.1f}"
        if self._nbytes is None:
            left = seconds * (self._layers - self._ready) / self._ready
        else:
            left = max(0, self._nbytes - self._bytes) / max(1, rate)
            done += f" of {self._nbytes / GIB:.1f}"
        return (
            f"experts of {self._ready} of {self._layers} layers are in memory, "
            f"{done} GiB at {rate / GIB:.2f} GiB/s, {left:.0f} s left"
        )

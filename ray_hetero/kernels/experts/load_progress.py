"""Lines in the log while the experts of many layers are brought into the order of the kernel."""

from __future__ import annotations

import time

from placement.units import GIB
from ray_hetero.log import logger

INTERVAL_S = 10.0
"""Seconds between two lines."""


class LoadProgress:
    """Progress of a rank.

    Args:
        layers: that there are.

    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._ready, self._bytes = 0, 0
        self._began = self._said = time.monotonic()

    def add(self, nbytes: int) -> None:
        """Count a layer of so many bytes, and say how far it is if that was long ago."""
        self._ready += 1
        self._bytes += nbytes
        now = time.monotonic()
        if now - self._said >= INTERVAL_S and self._ready < self._layers:
            self._said = now
            logger.info("%s", self.described(now - self._began))

    def described(self, seconds: float) -> str:
        """Progress after so many seconds, of at least one layer."""
        left = seconds * (self._layers - self._ready) / self._ready
        return (
            f"experts of {self._ready} of {self._layers} layers are in memory, "
            f"{self._bytes / GIB:.1f} GiB at {self._bytes / GIB / seconds:.2f} GiB/s, "
            f"{left:.0f} s left"
        )

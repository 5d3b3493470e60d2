"""Notice at once that the Ray of an engine is gone: its head, its raylet, or the process over both.

Ray itself ends the engine's process ten seconds after its head has gone, without a reason, and
leaves an engine whose raylet is gone to wait for it.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import psutil

SERVERS = {
    "gcs_server": "the head of this engine's Ray (gcs_server",
    "raylet": "this engine's raylet (raylet",
}
"""Ray's own processes without which no rank can go on, and how to name them."""
KEEPER = "the process that keeps this engine's Ray (ray_ahead"
STOP_SECONDS = 2.0
"""Longest wait for the watch to stop, in seconds; what it has called may wait for a Ray that is
gone."""
SETTLE_SECONDS = 0.2
"""Wait for others' ends once one is known, in seconds."""
LOOK_MS = 500
"""Interval at which the watch looks whether it is to stop, in milliseconds."""


def servers_among(processes: Sequence[psutil.Process], keeper: int | None) -> dict[int, str]:
    """The processes that an engine cannot do without, and how to name each, by process id.

    Args:
        processes: of a Ray that was started for this engine.
        keeper: process id of the one that keeps it; None where this process does.

    """
    found = {} if keeper is None else {keeper: KEEPER}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if (name := process.name()) in SERVERS:
                found[process.pid] = SERVERS[name]
    return found


class RayWatch:
    """A thread that waits for the first of these processes to end.

    Args:
        processes: how to name each, by process id, those first that others end with.
        on_end: called once, with one line about the one that has ended.

    """

    def __init__(self, processes: Mapping[int, str], on_end: Callable[[str], object]) -> None:
        self._on_end = on_end
        self._stop = threading.Event()
        self._watched = {}
        self._gone: str | None = None
        for pid, name in processes.items():
            try:
                self._watched[os.pidfd_open(pid)] = f"{name}, pid {pid})"
            except ProcessLookupError:
                self._gone = f"{name}, pid {pid})"
        self._thread = threading.Thread(target=self._watch, daemon=True, name="RayWatch")
        self._thread.start()

    def stop(self) -> None:
        """Report nothing from now on; safe to call twice."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(STOP_SECONDS)

    def _watch(self) -> None:
        poll = select.poll()
        for descriptor in self._watched:
            poll.register(descriptor, select.POLLIN)
        while self._gone is None and not self._stop.is_set():
            if poll.poll(LOOK_MS):
                # Others may have ended because of the one that comes before them.
                time.sleep(SETTLE_SECONDS)
                ended = {descriptor for descriptor, _ in poll.poll(0)}
                self._gone = next(name for at, name in self._watched.items() if at in ended)
        for descriptor in self._watched:
            os.close(descriptor)
        if self._gone is not None and not self._stop.is_set():
            self._on_end(f"{self._gone} has ended without being asked to")

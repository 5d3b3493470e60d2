"""A heartbeat of engine processes, which tells API servers that one of them has stopped.

An engine process that is stopped, or that hangs, answers nobody, and nothing closes: its server
would call it healthy for ever.  So a thread of the engine writes two numbers into a piece of the
server's memory, twice a second: when it was last alive, and since when the engine's loop has been
in a step.  Both are seconds of the clock that all processes of a host share.

- A stopped process, or one whose threads all wait for a lock, is late after `limit_s`.
- A step may take as long as a step may take (`serving.step_timeout_s`), and `limit_s` longer.
- An engine that is on its way up has no heartbeat yet, and one that starts its ranks again tells
  the servers so itself; neither is late.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time

from ray_hetero.log import logger
from ray_hetero.runtime import exit_reason

VARIABLE = "RAY_HETERO_HEARTBEAT"
"""Environment variable that tells the engines of a command and its API servers, which are processes
of their own, the path of their memory."""
BEAT_SECONDS = 0.5
_ENTRY = struct.Struct("dd")
"""Time of the last beat, and time at which the step under way began; 0 for none."""
ENGINES = 64
"""Engines of a data-parallel server on one host that can be told apart."""

_descriptors: list[int] = []
"""Memory of this process's engines, until it ends."""


def new_path() -> str:
    """Path at which one more engine's heartbeat can be found, while this process lives."""
    if path := os.environ.get(VARIABLE):
        return path
    descriptor = os.memfd_create("ray_hetero-heartbeat")
    os.ftruncate(descriptor, ENGINES * _ENTRY.size)
    _descriptors.append(descriptor)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    if exit_reason.is_command():
        os.environ[VARIABLE] = path
    return path


def late(path: str, limit_s: float, step_limit_s: float) -> str | None:
    """Problem of one of the engines, in words for a client; None while all go on.

    Args:
        path: from `new_path`.
        limit_s: longest time between two beats, in seconds.
        step_limit_s: longest time of a step, in seconds.

    """
    try:
        with open(path, "rb") as file:
            content = file.read(ENGINES * _ENTRY.size)
    except OSError:
        # Gone with the process that has started the engine, which ends with it.
        return None
    now = time.monotonic()
    for beat, since in _ENTRY.iter_unpack(content):
        if beat and now - beat > limit_s:
            return f"the engine's process has not moved for {now - beat:.0f} s"
        if since and now - since > step_limit_s + limit_s:
            return f"the engine's loop has been in one step for {now - since:.0f} s"
    return None


class Heartbeat:
    """An engine's end: a thread that beats, for as long as this process lives.

    Args:
        path: from `new_path`, of the process that has started the engine.
        engine: number of the engine among those of its server.

    """

    def __init__(self, path: str, engine: int) -> None:
        self._at = engine % ENGINES * _ENTRY.size
        self._since = 0.0
        self._stop = threading.Event()
        self._memory: mmap.mmap | None = None
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            logger.warning("/health will not notice an engine that has stopped: %s", error)
            return
        try:
            self._memory = mmap.mmap(descriptor, ENGINES * _ENTRY.size)
        finally:
            os.close(descriptor)
        self._write(time.monotonic())
        threading.Thread(target=self._beat, daemon=True, name="Heartbeat").start()

    def begin_step(self) -> None:
        """The engine's loop begins a step."""
        self._since = time.monotonic()

    def end_step(self) -> None:
        """The step is over, whatever became of it."""
        self._since = 0.0

    def end(self) -> None:
        """The engine ends, which takes as long as it takes."""
        self._stop.set()

    def _write(self, beat: float) -> None:
        assert self._memory is not None
        _ENTRY.pack_into(self._memory, self._at, beat, self._since)

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            self._write(time.monotonic())
        self._write(0.0)

"""Keep a signal from ending a shutdown half-way."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def sigterm_held() -> Iterator[None]:
    """Let SIGTERM wait until the block is done; in other threads than the main one, nothing.

    vLLM's engine process takes its own handler off before it shuts down, and after a failure the
    API server asks it to end at that very moment: a Ray of its own would be left half stopped.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True

    handler = signal.signal(signal.SIGTERM, remember)
    try:
        yield
    finally:
        # None is a handler that was not set from Python, and cannot be put back from here.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)
        if came:
            os.kill(os.getpid(), signal.SIGTERM)

"""End the engine's process when the process that started it is gone.

vLLM's engine process waits for requests of the API server; it does not notice when that one is
killed, and would hold its sockets and GPUs for ever.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import wait

from ray_hetero.log import logger

ENGINE_PROCESS = "EngineCore"
"""Beginning of the names of vLLM's engine processes."""
END_SECONDS = 10.0
"""Seconds that the engine may take to end in order."""


def end_with_parent(stop_ranks: Callable[[], object]) -> None:
    """Start to watch; nothing to do in a process that vLLM has not started.

    Args:
        stop_ranks: called first, from another thread; start-up may wait for them.

    """
    parent = multiprocessing.parent_process()
    if parent is not None and in_engine_process():
        threading.Thread(
            target=_wait, args=(parent.sentinel, stop_ranks), daemon=True, name="ParentWatch"
        ).start()


def in_engine_process() -> bool:
    """Whether this is a process that vLLM has started for an engine, and for nothing else."""
    name = multiprocessing.current_process().name
    return multiprocessing.parent_process() is not None and name.startswith(ENGINE_PROCESS)


def end_within(limit_s: float) -> None:
    """Kill this process in a while, should it not have ended by itself before.

    Args:
        limit_s: seconds until then.

    """
    killer = threading.Timer(limit_s, os.kill, (os.getpid(), signal.SIGKILL))
    killer.daemon = True
    killer.start()


def _wait(parent: int, stop_ranks: Callable[[], object]) -> None:
    wait([parent])
    logger.error("ray_hetero: the process that started this engine is gone; stopping")
    # Should anything below take too long: Ray's reaper sweeps up behind this process.
    end_within(END_SECONDS)
    stop_ranks()
    # vLLM's own way to end an engine process.
    os.kill(os.getpid(), signal.SIGTERM)

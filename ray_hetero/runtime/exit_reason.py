"""End the command line with one clear line, not with a traceback of somebody else's process.

`vllm serve` runs the engine in a child process; what went wrong there reaches the parent only as
"engine core failed".  The child leaves its reason in a file of the parent's that has no name, and
so is gone with it however it ends; the parent prints it last.  In a notebook or a script exceptions
are left alone.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from placement.errors import PlacementError
from ray_hetero.errors import RayHeteroError

VARIABLE = "RAY_HETERO_LAST_WORDS"
LOOK_AT = {
    signal.SIGBUS: (
        ": memory that it shares with its ranks was not there. Look at `df -h /dev/shm`: free what "
        "fills it, or give it more (docker run --shm-size=2g)."
    ),
    signal.SIGKILL: ". If nobody did that, memory ran out: look at `dmesg | grep -i kill`.",
}
"""Usual cause of each signal, as the end of a message."""


def catch() -> None:
    """In a process that runs a command of vLLM: when it ends for a reason, print that last."""
    if VARIABLE in os.environ or not is_command():
        return
    descriptor, owner, previous = os.memfd_create("ray_hetero"), os.getpid(), sys.excepthook
    # The engine's process does not inherit the file, but may open it.
    name = os.environ[VARIABLE] = f"/proc/{owner}/fd/{descriptor}"
    own: list[str] = []

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, RayHeteroError | PlacementError):
            own.append(str(error))
        else:
            previous(kind, error, trace)

    def end() -> None:
        # Forked children inherit the handler.
        if os.getpid() != owner:
            return
        reason = own[0] if own else Path(name).read_text(encoding="utf-8")
        if reason:
            _end_with(reason)

    sys.excepthook = note
    atexit.register(end)


def leave(reason: str) -> None:
    """In the engine's process: leave the reason for the command; the first one counts."""
    if name := os.environ.get(VARIABLE):
        # A command that is gone, or is being taken down, has no files any more.
        with suppress(FileNotFoundError, PermissionError):
            if not Path(name).stat().st_size:
                Path(name).write_text(reason, encoding="utf-8")


def engine_ended(pid: int, status: int) -> None:
    """In the process of the command: say how the engine's has ended, which could not.

    Args:
        pid: of the engine's process.
        status: with which it ended without being asked to; less than 0 for a signal.

    """
    if status < 0:
        ended_by = signal.Signals(-status)
        hint = LOOK_AT.get(ended_by, ".")
        leave(f"the engine's process, pid {pid}, was ended by {ended_by.name}{hint}")
    else:
        leave(
            f"the engine's process, pid {pid}, ended with status {status} without being asked to. "
            "Its last lines are above; Ray ends it so when the cluster's head (gcs_server) is gone."
        )


def is_command() -> bool:
    """Whether this is `vllm …` or `python -m vllm.entrypoints.…`, as containers start it."""
    module = getattr(sys.modules["__main__"].__spec__, "name", "")
    return Path(sys.argv[0]).name == "vllm" or module.startswith("vllm.entrypoints.")


def _end_with(reason: str) -> NoReturn:
    # For vLLM's API server a dead engine is an ordinary end, with status 0; and libraries print
    # while the interpreter is taken down.
    logging.shutdown()
    sys.stdout.flush()
    print(f"ray_hetero: {reason}", file=sys.stderr, flush=True)
    os._exit(1)

"""End the command line with one clear line, not with a traceback of somebody else's process.

`vllm serve` runs the engine in a child process; what went wrong there reaches the parent only as
"engine core failed".  The child leaves its reason in a file that the parent has named, and the
parent prints it last.  In a notebook or a script exceptions are left alone.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from placement.errors import PlacementError
from ray_hetero.errors import RayHeteroError

VARIABLE = "RAY_HETERO_LAST_WORDS"


def catch() -> None:
    """In the process of the `vllm` command: print reasons plainly when it ends by an exception."""
    if Path(sys.argv[0]).name != "vllm" or VARIABLE in os.environ:
        return
    descriptor, path = tempfile.mkstemp(prefix="ray_hetero-", suffix=".reason")
    os.close(descriptor)
    os.environ[VARIABLE] = path
    previous = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        is_own = isinstance(error, RayHeteroError | PlacementError)
        if not is_own:
            previous(kind, error, trace)
        reason = str(error) if is_own else _taken(Path(path))
        if reason:
            print(f"ray_hetero: {reason}", file=sys.stderr, flush=True)

    sys.excepthook = report
    _remove_at_exit(Path(path))


def leave(reason: str) -> None:
    """In the engine's process: leave the reason for the command; the first one counts."""
    path = os.environ.get(VARIABLE)
    if path and Path(path).exists() and not Path(path).stat().st_size:
        Path(path).write_text(reason, encoding="utf-8")


def _taken(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _remove_at_exit(path: Path) -> None:
    import atexit

    owner = os.getpid()
    # Forked children inherit the handler, not the file.
    atexit.register(lambda: path.unlink(missing_ok=True) if os.getpid() == owner else None)

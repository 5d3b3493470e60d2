"""Cause of the end of ranks: told apart from its consequences, and reported once to all waits.

When one rank dies, its peers fail a moment later in whatever they were doing with it, and their
errors may arrive first.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch.distributed as dist
from ray.exceptions import RayActorError, RayError, RayTaskError

from placement.errors import PlacementError
from ray_hetero.errors import RankError, RayHeteroError

if TYPE_CHECKING:
    from ray_hetero.executor.rank_processes import RankProcesses

SETTLE_SECONDS = 2.0
"""Longest wait for other ranks' ends once one is known, in seconds."""
POLL_SECONDS = 1.0
"""Interval at which the watch looks whether it is to stop, in seconds; short, because Ray must not
be left while a thread waits inside it."""


class Severity(IntEnum):
    """How a rank ended; the likelier cause of other ranks' ends comes first."""

    DIED = 0
    FAILED = 1
    LOST_A_PEER = 2
    """The rank failed in an exchange with another rank."""


PLACE = re.compile(r'File "([^"]+)", line (\d+)')
"""Places of code in the text of a traceback: file and line."""


@dataclass(frozen=True)
class Ending:
    """How a call of one rank ended without an answer."""

    rank: int
    severity: Severity
    text: str
    error: RayHeteroError | PlacementError | None = None
    """Error that the rank raised for the user; None for any other error."""


def ending_of(rank: int, ref: Any) -> Ending | None:
    """Read how a finished call of a rank ended; None for a call that has an answer."""
    try:
        ray.get(ref, timeout=0)
    except RayTaskError as error:
        # Ray raises an error that is of the cause's class too, and has its traceback only as text.
        return ending(rank, error.cause, str(error))
    except RayActorError as error:
        return Ending(rank, Severity.DIED, " ".join(["died", plain(str(error))]).strip())
    except RayError as error:
        return Ending(rank, Severity.DIED, f"was lost: {error}")
    return None


def ending(rank: int, cause: Exception, traceback: str = "") -> Ending:
    """Describe the end of a rank that has raised.

    Args:
        rank: the rank.
        cause: its error.
        traceback: text of the error's traceback, of which the last line of code is told where the
            error has no message, as an assertion.

    """
    if isinstance(cause, RayHeteroError | PlacementError):
        return Ending(rank, Severity.FAILED, f"failed: {cause}", cause)
    has_lost_peer = isinstance(cause, dist.DistError) or "gloo" in str(cause)
    severity = Severity.LOST_A_PEER if has_lost_peer else Severity.FAILED
    places = PLACE.findall(traceback) if not str(cause) else []
    where = f" at {'/'.join(Path(places[-1][0]).parts[-3:])}:{places[-1][1]}" if places else ""
    return Ending(rank, severity, f"failed: {said_by(cause)}{where}")


def said_by(error: Exception) -> str:
    """Put an error into one line: CUDA's go on with advice for its own developers."""
    first, *more = str(error).splitlines() or [""]
    return f"{type(error).__name__}({first!r})" if more else repr(error)


def causes(endings: Sequence[Ending]) -> list[Ending]:
    """Choose, of ranks that ended together, those that the others followed."""
    first = min(ending.severity for ending in endings)
    return [ending for ending in endings if ending.severity is first]


def plain(message: str) -> str:
    """Put what Ray knows of an actor's death in parentheses, without its table of ids and guesses.

    The text is empty where Ray only knows of a process that is gone.
    """
    lines = [line for line in message.splitlines() if line.strip() and not line.startswith("\t")]
    text = " ".join(lines[1:] or lines)
    _, _, detail = text.rpartition("Worker exit detail: ")
    detail = re.split(r" (?=There are some potential|Some common causes)", detail)[0]
    return "" if "End of file" in detail else f"({detail})"


def report_of(endings: Sequence[Ending], processes: RankProcesses) -> str:
    """Say in one line which ranks ended first, of what, and what they left behind."""
    return "; ".join(_told(ending, processes) for ending in causes(endings))


def _told(ending: Ending, processes: RankProcesses) -> str:
    told = f"{processes.describe(ending.rank)}, {ending.text}"
    if ending.severity is Severity.DIED:
        return f"{told}; {processes.traces(ending.rank)}"
    if ending.severity is Severity.LOST_A_PEER:
        return f"{told}. Meanwhile {processes.look()}"
    return told


class Failure:
    """Cause of the end of a generation of ranks, once it is known; the first report stays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known = threading.Event()
        self.report: str | None = None
        """One line about the rank; None while all is well."""

    def tell(self, report: str) -> bool:
        """Make a report; whether it was the first."""
        with self._lock:
            is_first = self.report is None
            if is_first:
                self.report = report
                self._known.set()
        return is_first

    def wait(self, limit_s: float) -> str | None:
        """Wait for the report; None when there is none within the limit, in seconds."""
        self._known.wait(limit_s)
        return self.report

    def check(self) -> None:
        """Go on while all is well.

        Raises:
            RankError: a rank has ended.

        """
        if self.report is not None:
            raise RankError(self.report)

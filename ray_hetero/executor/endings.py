"""How ranks ended: the cause told apart from its consequences.

When one rank dies, its peers fail a moment later in whatever they were doing with it, and their
errors may arrive first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import ray
import torch.distributed as dist
from ray.exceptions import RayActorError, RayError, RayTaskError

from placement.errors import PlacementError
from ray_hetero.errors import RayHeteroError

SETTLE_SECONDS = 2.0
"""How long to wait for other ranks' ends once one is known."""


class Severity(IntEnum):
    """The likelier cause first."""

    DIED = 0
    FAILED = 1
    LOST_A_PEER = 2
    """Failed in an exchange with another rank."""


@dataclass(frozen=True)
class Ending:
    """How a call of one rank ended without an answer."""

    rank: int
    severity: Severity
    text: str
    error: RayHeteroError | PlacementError | None = None
    """What the rank raised for the user."""


def ending_of(rank: int, ref: Any) -> Ending | None:
    """How a finished call ended; None for one that has an answer."""
    try:
        ray.get(ref, timeout=0)
    except RayTaskError as error:
        return ending(rank, error.cause)
    except RayActorError as error:
        return Ending(rank, Severity.DIED, " ".join(["died", plain(str(error))]).strip())
    except RayError as error:
        return Ending(rank, Severity.DIED, f"was lost: {error}")
    return None


def ending(rank: int, cause: Exception) -> Ending:
    """The end of a rank that has raised."""
    if isinstance(cause, RayHeteroError | PlacementError):
        return Ending(rank, Severity.FAILED, f"failed: {cause}", cause)
    has_lost_peer = isinstance(cause, dist.DistError) or "gloo" in str(cause)
    severity = Severity.LOST_A_PEER if has_lost_peer else Severity.FAILED
    return Ending(rank, severity, f"failed: {_said_by(cause)}")


def _said_by(error: Exception) -> str:
    """What an error says, in one line: CUDA's go on with advice for its own developers."""
    first, *more = str(error).splitlines() or [""]
    return f"{type(error).__name__}({first!r})" if more else repr(error)


def causes(endings: Sequence[Ending]) -> list[Ending]:
    """Of ranks that ended together, those that the others followed."""
    first = min(ending.severity for ending in endings)
    return [ending for ending in endings if ending.severity is first]


def plain(message: str) -> str:
    """What Ray knows of an actor's death, in parentheses.

    Without its table of ids and its guesses; nothing where it only knows of a process that is gone.
    """
    lines = [line for line in message.splitlines() if line.strip() and not line.startswith("\t")]
    text = " ".join(lines[1:] or lines)
    _, _, detail = text.rpartition("Worker exit detail: ")
    detail = re.split(r" (?=There are some potential|Some common causes)", detail)[0]
    return "" if "End of file" in detail else f"({detail})"

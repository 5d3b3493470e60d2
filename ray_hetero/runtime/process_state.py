"""State of a process of this host, read from /proc, as a rank that hangs cannot be asked."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

STACKS_SIGNAL = signal.SIGUSR1
"""Signal that makes a rank write the stacks of all its threads into its log."""
SAMPLE_SECONDS = 0.5
BUSY_SHARE = 0.2
"""Share of one core's time above which a process computes, and below which it waits."""


@dataclass(frozen=True)
class ProcessId:
    """A process that no later one with the same number is mistaken for."""

    pid: int
    started: str
    """Start of the process in clock ticks since the host's boot; empty if it was gone already."""

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Name a process of this host."""
        return cls(pid, "".join(_stat(pid)[19:20]))

    @property
    def is_there(self) -> bool:
        """Whether it runs, waits or is stopped; one that only awaits its parent is gone."""
        fields = _stat(self.pid)
        return bool(self.started) and fields[19:20] == [self.started] and fields[0] not in "ZX"

    def __str__(self) -> str:
        return f"pid {self.pid}"


@dataclass(frozen=True)
class Place:
    """A rank's process on its node, as the rank itself tells when it starts."""

    process: ProcessId
    log: str
    """File that its standard error goes to; empty where that is none."""
    oom_kills: int
    """Processes that the kernel of the node had killed for lack of memory until then."""

    @classmethod
    def here(cls) -> Place:
        """Place of the calling process."""
        error = os.readlink("/proc/self/fd/2")
        return cls(ProcessId.of(os.getpid()), error if error.startswith("/") else "", oom_kills())


class Doing(IntEnum):
    """The likeliest culprits of a hang first."""

    STOPPED = 0
    TRACED = 1
    GONE = 2
    BLOCKED = 3
    COMPUTING = 4
    WAITING = 5


@dataclass(frozen=True)
class ProcessState:
    """One look at a process."""

    pid: int
    doing: Doing

    def __str__(self) -> str:
        return {
            Doing.STOPPED: f"stopped by a signal (kill -CONT {self.pid} lets it go on)",
            Doing.TRACED: "held by a debugger",
            Doing.GONE: "gone",
            Doing.BLOCKED: "waiting inside the kernel, for a disk or a device",
            Doing.COMPUTING: "computing",
            Doing.WAITING: "waiting",
        }[self.doing]


def states(
    processes: Mapping[int, ProcessId], sample_s: float = SAMPLE_SECONDS
) -> dict[int, ProcessState]:
    """Look at processes of this host.

    Args:
        processes: by rank.
        sample_s: how long to measure the time that they compute.

    """
    before = {rank: _cpu_seconds(process.pid) for rank, process in processes.items()}
    time.sleep(sample_s)
    return {
        rank: ProcessState(
            process.pid, _doing(process, (_cpu_seconds(process.pid) - before[rank]) / sample_s)
        )
        for rank, process in processes.items()
    }


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; none when the process is gone."""
    try:
        # The name before them is in parentheses and may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _cpu_seconds(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _doing(process: ProcessId, share: float) -> Doing:
    if not process.is_there:
        return Doing.GONE
    letter = "".join(_stat(process.pid)[:1])
    if letter in ("T", "t"):
        return Doing.STOPPED if letter == "T" else Doing.TRACED
    if share > BUSY_SHARE:
        return Doing.COMPUTING
    return Doing.BLOCKED if letter == "D" else Doing.WAITING


def oom_kills() -> int:
    """Processes that the kernel of this host has killed for lack of memory since its boot."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)$", text, re.M)
    return int(found[1]) if found else 0

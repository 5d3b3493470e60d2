"""Faults that a soak injects: what is done to which process or disk, and for how long.

Each takes effect from outside, as an operating system, an operator or a full disk would have it.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from faulty_server import FaultyServer
from process_faults import OTHERS, process_of

SHORT_S, LONG_S = 0.5, 15.0
"""How long something is stopped or full: shorter and longer than the limits of the engine."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    name: str
    inject: Callable[[FaultyServer, random.Random], str]
    """Does it, and says to whom."""
    weight: int = 1
    """How often it is drawn."""


def _ranks(server: FaultyServer) -> list[tuple[str, int]]:
    return [(f"rank {rank}", pid) for rank, pid in sorted(server.pids.items())]


def _other(name: str) -> Callable[[FaultyServer], list[tuple[str, int]]]:
    def find(server: FaultyServer) -> list[tuple[str, int]]:
        try:
            return [(name, process_of(server, name).pid)]
        except (AssertionError, StopIteration, psutil.Error):
            return []

    return find


def _agents(server: FaultyServer) -> list[tuple[str, int]]:
    """Ray's two agents, which call themselves so."""
    found = server.scene.processes().items()
    return [(words, pid) for pid, words in found if words.startswith("ray::") and "Agent" in words]


_ENGINE = _other("engine")
_OTHERS = (*(_other(name) for name in OTHERS), _agents)


def _one_of(draw: random.Random, found: list[tuple[str, int]]) -> tuple[str, int]:
    if not found:
        return "nobody", 0
    return draw.choice(found)


def _kill(*targets: Callable[[FaultyServer], list[tuple[str, int]]]) -> Callable[..., str]:
    def inject(server: FaultyServer, draw: random.Random) -> str:
        who, pid = _one_of(draw, draw.choice(targets)(server))
        _signal(pid, signal.SIGKILL)
        return who

    return inject


def _stop(*targets: Callable[[FaultyServer], list[tuple[str, int]]]) -> Callable[..., str]:
    def inject(server: FaultyServer, draw: random.Random) -> str:
        who, pid = _one_of(draw, draw.choice(targets)(server))
        seconds = draw.choice([SHORT_S, LONG_S, 6 * LONG_S])
        _signal(pid, signal.SIGSTOP)
        time.sleep(seconds)
        _signal(pid, signal.SIGCONT)
        return f"{who} for {seconds:g} s"

    return inject


def _slow(server: FaultyServer, draw: random.Random) -> str:
    """Every rank computes for a fifth of the time."""
    ends = time.monotonic() + draw.choice([3, 10])
    while time.monotonic() < ends:
        for _, pid in _ranks(server):
            _signal(pid, signal.SIGSTOP)
        time.sleep(0.2)
        for _, pid in _ranks(server):
            _signal(pid, signal.SIGCONT)
        time.sleep(0.05)
    return "all ranks"


def _out_of_memory(server: FaultyServer, draw: random.Random) -> str:
    """No new page for one process."""
    who, pid = _one_of(draw, draw.choice([_ranks, _ranks, _ENGINE])(server))
    seconds = draw.choice([SHORT_S, LONG_S])
    with contextlib.suppress(OSError, psutil.Error):
        now = psutil.Process(pid).memory_info().vms
        soft, hard = resource.prlimit(pid, resource.RLIMIT_AS)
        resource.prlimit(pid, resource.RLIMIT_AS, (now, hard))
        time.sleep(seconds)
        resource.prlimit(pid, resource.RLIMIT_AS, (soft, hard))
    return f"{who} for {seconds:g} s"


def _full(folder: Callable[[FaultyServer], Path], *, kill: bool) -> Callable[..., str]:
    def inject(server: FaultyServer, draw: random.Random) -> str:
        file = folder(server) / "filled-by-the-soak"
        who = "full"
        try:
            with file.open("wb") as out:
                while (free := shutil.disk_usage(file.parent).free) > 0:
                    out.write(bytes(min(free, 16 << 20)))
                    out.flush()
        except OSError as error:
            who = f"{error.strerror}"
        if kill:
            victim, pid = _one_of(draw, _ranks(server))
            _signal(pid, signal.SIGKILL)
            who = f"{who}, {victim} killed"
        time.sleep(LONG_S)
        file.unlink()
        return f"{file.parent}: {who}, for {LONG_S:g} s"

    return inject


def _shared_memory(server: FaultyServer) -> Path:
    return Path("/dev/shm")


def _temporary(server: FaultyServer) -> Path:
    return server.scene.temporary


def _signal(pid: int, number: signal.Signals) -> None:
    # It may have ended by itself, or by the fault before.
    with contextlib.suppress(ProcessLookupError):
        if pid:
            os.kill(pid, number)


PROCESSES = (
    Fault("kill a rank", _kill(_ranks), 4),
    Fault("stop a rank", _stop(_ranks), 4),
    Fault("kill another process", _kill(*_OTHERS), 3),
    Fault("stop another process", _stop(*_OTHERS), 3),
    Fault("slow ranks", _slow, 2),
    Fault("out of memory", _out_of_memory, 2),
)
"""Faults that need no right beside that of signals."""
DISKS = (
    Fault("/dev/shm full", _full(_shared_memory, kill=False)),
    Fault("/dev/shm full in a restart", _full(_shared_memory, kill=True)),
    Fault("TMPDIR full", _full(_temporary, kill=False)),
    Fault("TMPDIR full in a restart", _full(_temporary, kill=True)),
)
"""Faults of file systems, which have to be the soak's own."""

"""Processes of the ranks, and what can be learned about them on their nodes.

A rank that hangs or has died cannot be asked.  Its node can: by one short task there.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import TypeVar

import ray

from placement.cluster import ray_cluster
from ray_hetero.runtime.process_state import (
    STACKS_SIGNAL,
    Place,
    ProcessState,
    oom_kills,
    states,
)
from ray_hetero.world import World

ANSWER_SECONDS = 5.0
"""Longest wait for a node, in seconds; one that is gone must not delay the end of an engine."""
ASKED_SECONDS = 1.0
"""Longest wait for a process that Ray has asked to end, in seconds."""
GONE_SECONDS = 3.0
"""Longest wait for a killed process to be gone, in seconds."""
POLL_SECONDS = 0.05
"""Interval at which a node looks whether a process is gone, in seconds."""
LOG_TAIL_BYTES = 1 << 16
"""End of a rank's log that is searched for a crash, in bytes."""

T = TypeVar("T")


class RankProcesses:
    """The processes of one generation of ranks.

    Args:
        world: who is on which node.
        places: by rank.

    """

    def __init__(self, world: World, places: Sequence[Place]) -> None:
        self._world = world
        self._places = places
        self._by_node: dict[str, dict[int, Place]] = {}
        for seat, place in zip(world.members, places, strict=True):
            self._by_node.setdefault(seat.node_id, {})[seat.rank] = place

    @property
    def pids(self) -> frozenset[int]:
        """The ranks' processes, each numbered by its own node."""
        return frozenset(place.process.pid for place in self._places)

    def describe(self, rank: int) -> str:
        """Name a rank for people: device, node and process."""
        return f"{self._world.describe(rank)}, {self._places[rank].process}"

    def look(self) -> str:
        """Activities of all ranks, the likeliest culprit of a hang first.

        The ranks also write the stacks of their threads into their logs.
        """
        found: dict[int, ProcessState] = {}
        for answer in self._on_nodes(_look_here).values():
            found |= answer
        known = sorted(found, key=lambda rank: (found[rank].doing, rank))
        said = [f"{self.describe(rank)}, is {found[rank]}" for rank in known]
        silent = [seat for seat in self._world.members if seat.rank not in found]
        said += [f"{self.describe(seat.rank)}: its node does not answer" for seat in silent]
        return "; ".join(said)

    def logs(self) -> str:
        """Paths of the ranks' logs, each with its rank and node."""
        return ", ".join(
            f"{place.log} (rank {rank}, node {self._world.members[rank].node_name})"
            for rank, place in enumerate(self._places)
            if place.log
        )

    def traces(self, rank: int) -> str:
        """Traces that a dead rank has left on its node, in words."""
        node = self._world.members[rank].node_id
        answers = self._on_nodes(lambda places: _traces_of(places[rank]), {node})
        return answers.get(node, "its node does not answer")

    def remove_shared_names(self) -> None:
        """Remove the names of shared memory that ranks have made and this process does not know.

        A rank that has loaded makes a queue for its answers, and removes its name once it is asked
        to serve.  Ray ends a rank together with Python's tracker of such names.
        """
        known = _shared_names(os.getpid())
        self._on_nodes(lambda places: _remove_names_here(places, known))

    def end(self) -> None:
        """Wait until the ranks that Ray has asked to end are gone, and kill those that stay.

        A stopped process does not hear Ray.  One that is killed before it has answered Ray looks to
        Ray like a crash, of which it warns the user at length.  Once a process is gone its socket's
        claim and its GPU's memory are free.
        """
        self._on_nodes(_end_here)

    def _on_nodes(
        self,
        function: Callable[[Mapping[int, Place]], T],
        nodes: frozenset[str] | set[str] | None = None,
    ) -> dict[str, T]:
        by_node = self._by_node

        def here() -> T:
            return function(by_node[ray.get_runtime_context().get_node_id()])

        return ray_cluster.on_nodes(here, nodes or self._world.node_ids, ANSWER_SECONDS)


def _look_here(places: Mapping[int, Place]) -> dict[int, ProcessState]:
    found = states({rank: place.process for rank, place in places.items()})
    _send(STACKS_SIGNAL, places)
    return found


def _shared_names(pid: int) -> set[str]:
    """Files of Python's shared memory that a process has mapped, and that have a name."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return set(re.findall(r" (/dev/shm/psm_\w+)$", maps, re.M))


def _remove_names_here(places: Mapping[int, Place], known: Set[str]) -> None:
    for place in places.values():
        if place.process.is_there:
            for name in _shared_names(place.process.pid) - known:
                Path(name).unlink(missing_ok=True)


def _end_here(places: Mapping[int, Place]) -> None:
    if not _are_gone(places, ASKED_SECONDS):
        _send(signal.SIGKILL, places)
        _are_gone(places, GONE_SECONDS)


def _are_gone(places: Mapping[int, Place], limit_s: float) -> bool:
    """Wait until processes are gone; whether they are within the limit, in seconds."""
    deadline = time.monotonic() + limit_s
    while any(place.process.is_there for place in places.values()):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _send(number: signal.Signals, places: Mapping[int, Place]) -> None:
    for place in places.values():
        if place.process.is_there:
            # It may end at this very moment.
            with contextlib.suppress(ProcessLookupError):
                os.kill(place.process.pid, number)


def _traces_of(place: Place) -> str:
    if crash := crash_in(place.log):
        return f"it crashed: {crash}"
    if oom_kills() > place.oom_kills:
        return "the kernel has killed processes there meanwhile, for lack of memory"
    return "it left no word, as after SIGKILL (kill -9)"


def crash_in(log: str) -> str:
    """The line about a crash in native code at the end of a rank's log, if there is one."""
    try:
        with Path(log).open("rb") as file:
            file.seek(-min(LOG_TAIL_BYTES, Path(log).stat().st_size), os.SEEK_END)
            tail = file.read().decode(errors="replace")
    except OSError:
        return ""
    found = re.findall(r"^(?:Fatal Python error: .*|\*\*\* SIG\w+ received.*)$", tail, re.M)
    return found[-1].strip() if found else ""

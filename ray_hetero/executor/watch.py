"""Watch the ranks while the engine runs, and say who died of what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import ray

from ray_hetero.executor.actors import RankHandle
from ray_hetero.executor.endings import SETTLE_SECONDS, Ending, Severity, causes, ending_of
from ray_hetero.executor.rank_processes import RankProcesses

POLL_SECONDS = 1.0
"""Short, because Ray must not be left while a thread waits inside it."""


class RankWatch:
    """A thread that waits for the first rank to end.

    Args:
        processes: the ranks' processes, for naming them and for what a dead one left behind.
        handles: ranks whose `run` is under way.
        on_death: called once, with one line about what ended and why.

    """

    def __init__(
        self,
        processes: RankProcesses,
        handles: Sequence[RankHandle],
        on_death: Callable[[str], object],
    ) -> None:
        self._processes = processes
        self._ranks = {handle.run_ref: handle.rank for handle in handles}
        self._on_death = on_death
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="RankWatch")
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; returns when the thread is out of Ray."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10 * POLL_SECONDS)

    def _watch(self) -> None:
        while not self._stop.is_set() and ray.is_initialized():
            done, _ = ray.wait(list(self._ranks), num_returns=1, timeout=POLL_SECONDS)
            if done and not self._stop.is_set():
                self._tell()
                return

    def _tell(self) -> None:
        report = "a rank has ended"
        try:
            report = self._report()
        finally:
            # Whatever keeps the cause from being found, the engine must not go on.
            if not self._stop.is_set():
                self._on_death(report)

    def _report(self) -> str:
        # The first to be heard of need not be the first that died.
        ended, _ = ray.wait(list(self._ranks), num_returns=len(self._ranks), timeout=SETTLE_SECONDS)
        endings = [
            ending_of(self._ranks[ref], ref)
            or Ending(self._ranks[ref], Severity.FAILED, "ended by itself")
            for ref in ended
        ]
        return "; ".join(map(self._told, causes(endings)))

    def _told(self, ending: Ending) -> str:
        told = f"{self._processes.describe(ending.rank)}, {ending.text}"
        if ending.severity is Severity.DIED:
            return f"{told}; {self._processes.traces(ending.rank)}"
        if ending.severity is Severity.LOST_A_PEER:
            return f"{told}. Meanwhile {self._processes.look()}"
        return told

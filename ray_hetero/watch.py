"""Watch the ranks while the engine serves, and say who died of what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from ray_hetero.actors import RankHandle
from ray_hetero.lockstep import describe
from ray_hetero.world import World

POLL_SECONDS = 1.0
"""Short, because Ray must not be left while a thread waits inside it."""


class RankWatch:
    """A thread that waits for the first rank to end.

    Args:
        world: for naming ranks.
        handles: ranks whose `run` is under way.
        on_death: called once, with one line about the first rank that ended.

    """

    def __init__(
        self, world: World, handles: Sequence[RankHandle], on_death: Callable[[str], None]
    ) -> None:
        self._world = world
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
                self._on_death(f"{describe(self._world, self._ranks[done[0]])} {_cause(done[0])}")
                return


def _cause(run_ref: object) -> str:
    """What the end of a rank's `run` says about why it ended."""
    try:
        ray.get(run_ref, timeout=0)
    except RayTaskError as error:
        return f"failed: {error.cause!r}"
    except RayActorError as error:
        return f"died: {error}"
    except RayError as error:
        return f"was lost: {error}"
    return "ended by itself"

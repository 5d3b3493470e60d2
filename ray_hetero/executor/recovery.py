"""Start the ranks of a running engine again, inside its process.

vLLM's engine loop asks a *sentinel* what to do when a step raises (vllm.v1.fault_tolerance).  This
one starts the ranks again and lets the loop go on.  So everything that clients see lives on: the
API server, its connection to the engine, the engine's scheduler and its settings; the only thing
that is new is what was lost.  The other way, a new engine process under the API server that is
there, has no place in vLLM: a client shakes hands with its engine once, when it is made.

What was in the dead ranks' KV cache is gone:

- every request that the engine knows of ends with an error, also those that wait, for they would
  wait through the start; their clients may send them again (503);
- batches on their way are dropped, so that no answer is taken for another batch's;
- the prefix cache is emptied: the blocks that it names are blank on the new ranks.

The new ranks sit in the same bundles, with the same layers, and are asked for everything that vLLM
asked of the first ones on their way up, in the same order; so their KV caches have the sizes that
the scheduler counts on.
"""

from __future__ import annotations

import gc
import time
import traceback
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine import EngineStatusType
from vllm.v1.fault_tolerance.engine_core_sentinel import EngineCoreSentinel

from placement.errors import PlacementError
from ray_hetero.compat.engine import engine_core
from ray_hetero.compat.engine.engine_args import spec_of
from ray_hetero.errors import RayHeteroError
from ray_hetero.executor.failure import said_by
from ray_hetero.log import logger
from ray_hetero.runtime import exit_reason

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Pauses in seconds behind the first, second, … start that has failed, the last behind all others.
A disk that is full for a moment would else spend all restarts within that moment."""
POLL_S = 0.1
"""Interval at which a pause looks whether the engine is to end, in seconds."""


class RankRecovery(EngineCoreSentinel):  # type: ignore[misc]
    """Asked by the engine's loop when it has raised; returns when the loop may go on."""

    engine: EngineCoreProc

    def on_fault(self, exc: Exception) -> None:
        """Start the ranks again.

        Raises:
            Exception: the loop's own error, if it is none of the ranks, or they do not come up.
            SystemExit: the engine is to end, and would wait for the next try.

        """
        executor: Any = self.engine.model_executor
        report = executor.verdict()
        if report is None:
            raise exc
        is_up, failed = False, 0
        try:
            while not is_up and executor.restarts_left:
                self._turn_away(report)
                if failed:
                    self._pause(PAUSES_S[min(failed, len(PAUSES_S)) - 1])
                failed += 1
                try:
                    executor.restart()
                    is_up = True
                except (RayHeteroError, PlacementError) as error:
                    report = f"the ranks do not start again: {error}"
                    logger.error("ray_hetero: %s", report)
                except (RuntimeError, OSError, RayError) as error:
                    # Of a rank in a call, of the system, of Ray: the next try may do better.
                    report = f"the ranks do not start again: {said_by(error)}"
                    logger.exception("ray_hetero: %s", report)
        finally:
            if not is_up and self.engine.is_running():
                exit_reason.leave(report)
        if not is_up:
            raise exc
        engine_core.forget_ranks(self.engine)
        # The old queues' sockets and threads end when they are collected, and the error's frames
        # hold them in cycles.
        traceback.clear_frames(exc.__traceback__)
        gc.collect()
        self._tell(EngineStatusType.HEALTHY, {})
        logger.info("ray_hetero: serving again; %d restarts left", executor.restarts_left)

    def _pause(self, seconds: float) -> None:
        """Wait, unless the engine is to end."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            if not self.engine.is_running():
                raise SystemExit
            time.sleep(POLL_S)

    def _turn_away(self, report: str) -> None:
        """End all requests with an error, and let the API server refuse new ones."""
        left = self.engine.model_executor.restarts_left
        # Clients are told what they can do; what has failed where is the operator's.
        logger.error("ray_hetero: starting the ranks again, %d tries left: %s", left, report)
        fault = f"the engine starts its ranks again, {left} tries left; please retry"
        self._tell(EngineStatusType.UNHEALTHY, {"fault_info": fault})
        engine_core.end_all_requests(self.engine)

    def _tell(self, status: EngineStatusType, fault: dict[str, str]) -> None:
        """Tell all API servers; the clients of offline engines understand no such message."""
        if not isinstance(spec_of(self.engine.vllm_config).engine_args, AsyncEngineArgs):
            return
        content = {"id": self.engine_index, "status": status.name.lower(), **fault}
        engine_core.tell_api_servers(self.engine, content)

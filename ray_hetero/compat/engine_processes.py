"""vLLM's engine processes: the time that one of this backend gets to end in order, and their end
where the server is to end while they start.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ray_hetero.compat.patching import original, replace

END_SECONDS = 30.0
"""Longest wait for an engine process that has been asked to end, in seconds.  Without a request
under way it takes two or three, most of it for a Ray that was started for it."""
Sockets = Callable[..., AbstractContextManager[Any]]
"""A function that makes a socket for a `with` block."""
ENDS_IN_ORDER = "_ray_hetero_ends_in_order"


def wait_for_engines_to_end(limit_s: float = END_SECONDS) -> None:
    """In a process that starts engines: let those of this backend end before they are killed.

    Replaces: `CoreEngineProcManager.shutdown`, `utils.wait_for_engine_startup` of vllm.v1.engine.
    Why: CoreEngineProcManager.shutdown kills an engine process and everything below it at once
    (`vllm serve`, whose --shutdown-timeout is 0) or after five seconds, and warns of that each
    time; so does its finalizer, which comes first where manager and client are collected together.
    vLLM waits longer for ROCm only (get_engine_process_shutdown_timeout).
    Can go when: an executor class can say how long its end takes.

    An engine that is still on its way up is killed as before: it would not hear of its end.  So is
    one whose --shutdown-timeout is over, which vLLM leaves to that.
    """
    from vllm.v1.engine import utils

    manager = original(utils, "CoreEngineProcManager")
    shut_down = original(manager, "shutdown")
    if hasattr(shut_down, "__ray_hetero__"):
        return
    wait_for_startup = original(utils, "wait_for_engine_startup")

    @functools.wraps(wait_for_startup)
    def wait_for_engine_startup(
        handshake_socket: Any,
        core_engines: Any,
        parallel_config: Any,
        coordinated_dp: Any,
        cache_config: Any,
        launch: Any,
    ) -> Any:
        answer = wait_for_startup(
            handshake_socket, core_engines, parallel_config, coordinated_dp, cache_config, launch
        )
        backend = parallel_config.distributed_executor_backend
        if getattr(backend, "is_ray_hetero", False) and launch.engine_manager is not None:
            setattr(launch.engine_manager, ENDS_IN_ORDER, True)
            _finalize_within(launch.engine_manager, limit_s)
        return answer

    @functools.wraps(shut_down)
    def shutdown(self: Any, timeout: float | None = None) -> None:
        if not timeout and hasattr(self, ENDS_IN_ORDER):
            timeout = limit_s
        shut_down(self, timeout)

    shutdown.__ray_hetero__ = True  # type: ignore[attr-defined]
    utils.wait_for_engine_startup = wait_for_engine_startup
    manager.shutdown = shutdown


def end_when_asked_during_start() -> None:
    """In a process that starts engines: let SIGTERM and Ctrl-C end the wait for them.

    Replaces: `utils.zmq_socket_ctx` of vllm.v1.engine.
    Why: vLLM's servers make a KeyboardInterrupt of a SIGTERM that comes while an engine starts, and
    zmq_socket_ctx, in which they wait for it, swallows that: the server serves in spite of it, or
    waits for ten minutes (VLLM_ENGINE_READY_TIMEOUT_S) for an engine that has failed to start.
    Can go when: zmq_socket_ctx lets a KeyboardInterrupt through.
    """
    from vllm.v1.engine import utils

    def make(stock: Sockets) -> Sockets:
        @contextmanager
        @functools.wraps(stock)
        def zmq_socket_ctx(*args: Any, **kwargs: Any) -> Iterator[Any]:
            swallowed: KeyboardInterrupt | None = None
            with stock(*args, **kwargs) as socket:
                try:
                    yield socket
                except KeyboardInterrupt as interrupt:
                    swallowed = interrupt
                    raise
            if swallowed is not None:
                raise swallowed

        return zmq_socket_ctx

    replace(utils, "zmq_socket_ctx", make)


def _finalize_within(manager: Any, limit_s: float) -> None:
    """Give the processes of a manager as long where it is collected, at once with its client."""
    ends = original(manager, "_finalizer").detach()
    if ends is not None:
        _, shut_down, arguments, _ = ends
        manager._finalizer = weakref.finalize(manager, shut_down, *arguments, timeout=limit_s)

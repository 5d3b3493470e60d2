"""vLLM's engine processes and their clients: how both end, while Ray is still there."""

from __future__ import annotations

import atexit
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ray_hetero.compat.engine import engine_environment
from ray_hetero.compat.patching import original, replace
from ray_hetero.log import logger

END_SECONDS = 60.0
"""Longest wait for an engine process that has been asked to end, in seconds: more than the limits
of all that it waits for in turn, ranks and a Ray that was started for it, some 30.  On an idle host
it takes two or three."""
Sockets = Callable[..., AbstractContextManager[Any]]
"""A function that makes a socket for a `with` block."""
SIGTERM = ("terminated",)
"""Arguments of the KeyboardInterrupt that a server's handler of SIGTERM raises."""
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
    Can go when: zmq_socket_ctx lets a KeyboardInterrupt through, and SIGTERM ends a server that
    starts with status 0, as it ends one that serves.
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
            if swallowed is not None and swallowed.args == SIGTERM:
                logger.info("ray_hetero: asked to end while the engine starts")
                raise SystemExit(0)
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


def end_engines_at_exit(
    ended: Callable[[int, int], None],
    while_starting: Callable[[Any], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Shut this process's engines down when the interpreter ends, while Ray is still there.

    The variables that the engine's processes have inherited by then are taken back.

    Replaces: `EngineCoreClient.make_client`, `EngineCoreClient.make_async_mp_client`.
    Uses: `MPClient.resources`, `InprocClient.shutdown`, `MPClient.shutdown`.
    Why: vLLM leaves that to finalizers.  They run after Ray's own exit handler, which stops a
    cluster that this process has started; the engine then reports that its ranks have died.  And
    to vLLM's API server an engine process that has ended is an ordinary end.
    Can go when: vLLM's clients have an exit handler of their own, and say what an engine died of.

    Args:
        ended: called before, for each engine process that has ended without being asked to: its
            id, and its exit status as `multiprocessing` has it, less than 0 for a signal.
        while_starting: entered with an engine's configuration while its process starts.

    """
    from vllm.v1.engine.core_client import EngineCoreClient

    clients: weakref.WeakSet[Any] = weakref.WeakSet()
    managers: list[Any] = []
    for name in ("make_client", "make_async_mp_client"):
        make = original(EngineCoreClient, name)
        if hasattr(make, "__ray_hetero__"):
            return
        setattr(
            EngineCoreClient,
            name,
            staticmethod(_remembering(make, while_starting, clients, managers)),
        )
    # Handlers run in the reverse order of their registration, and Ray is imported already.
    atexit.register(_shut_down, clients)
    atexit.register(_tell_ended, managers, ended)


def _remembering(
    make: Callable[..., Any],
    while_starting: Callable[[Any], AbstractContextManager[None]],
    clients: weakref.WeakSet[Any],
    managers: list[Any],
) -> Callable[..., Any]:
    signature = inspect.signature(make)

    @functools.wraps(make)
    def make_and_remember(*args: Any, **kwargs: Any) -> Any:
        vllm_config = signature.bind(*args, **kwargs).arguments["vllm_config"]
        try:
            with while_starting(vllm_config):
                client = make(*args, **kwargs)
        finally:
            engine_environment.take_back()
        clients.add(client)
        # An engine in this process has none.
        resources = getattr(client, "resources", None)
        if manager := getattr(resources, "engine_manager", None):
            managers.append(manager)
        return client

    make_and_remember.__ray_hetero__ = True  # type: ignore[attr-defined]
    return make_and_remember


def _tell_ended(managers: Sequence[Any], ended: Callable[[int, int], None]) -> None:
    for manager in managers:
        # The name of a process that has ended without being asked to.
        failed = original(manager, "failed_proc_name")
        for process in getattr(manager, "processes", ()):
            if process.name == failed and process.pid and process.exitcode is not None:
                ended(process.pid, process.exitcode)


def _shut_down(clients: weakref.WeakSet[Any]) -> None:
    for client in list(clients):
        client.shutdown()

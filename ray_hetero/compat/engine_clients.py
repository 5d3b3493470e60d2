"""vLLM's clients of its engines: their end, while Ray is still there."""

from __future__ import annotations

import atexit
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ray_hetero.compat import engine_environment
from ray_hetero.compat.patching import original


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

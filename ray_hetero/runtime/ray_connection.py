"""Connect to the Ray cluster there is, or start a small one of our own and stop it again."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator

import psutil
import ray

from ray_hetero.errors import StartupError
from ray_hetero.log import logger
from ray_hetero.runtime import exit_reason, local_ray
from ray_hetero.runtime.core_binding import move_process
from ray_hetero.runtime.ray_address import connect
from ray_hetero.runtime.ray_ahead import OwnedRay
from ray_hetero.runtime.ray_watch import RayWatch, servers_among


def connected_address() -> str | None:
    """Address of the cluster that this process is connected to, if it is."""
    if not ray.is_initialized():
        return None
    return str(ray.get_runtime_context().gcs_address)


def start_shared() -> str:
    """Start a Ray here for several engines, which are processes of their own; its address.

    Left alone each of them would start one, and each of these would give the same GPUs away.  It
    ends with this process.
    """
    handler = signal.getsignal(signal.SIGTERM)
    # Ray ends the engines without a word when this is gone.
    RayConnection(None).watch(exit_reason.leave)
    if threading.current_thread() is threading.main_thread():
        # Ray's own handler stops Ray at once, before the engines.
        signal.signal(signal.SIGTERM, handler)
    address = connected_address()
    assert address is not None
    return address


@contextlib.contextmanager
def _own_handler_kept() -> Iterator[None]:
    """Leave SIGTERM to whoever handles it here, as vLLM's engine process does.

    Ray's handlers print a stack, and stop a Ray that was started here before its engine has ended.
    """
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def show_lines_at_once() -> None:
    """Write this process's standard output line by line, wherever it goes.

    Ray prints the lines of ranks there and flushes none.  In a file or a pipe, as under systemd or
    in a job, they would be seen minutes later, when they fill a block of Python's buffer.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


class RayConnection:
    """This process's connection to Ray; remembers whether it was made, or Ray started, for it."""

    def __init__(self, address: str | None) -> None:
        """Connect to `address`, RAY_ADDRESS or the cluster already connected to; else start one.

        Raises:
            StartupError: the address does not answer, or wants another token.

        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self.is_own_connection = not ray.is_initialized()
        self.is_local = False
        self._ahead: OwnedRay | None = None
        self._watch: RayWatch | None = None
        if not self.is_own_connection:
            return
        show_lines_at_once()
        address = address or os.environ.get("RAY_ADDRESS") or None
        with _own_handler_kept():
            if address is None:
                self._start_local()
            else:
                connect(address, logging_level=logging.WARNING)
                logger.info("connected to the Ray cluster at %s", connected_address())

    def _start_local(self) -> None:
        self.is_local = True
        self._ahead = OwnedRay.claimed()
        if self._ahead is None:
            local_ray.start()
        else:
            local_ray.settle_environment()
            try:
                connect(self._ahead.address, logging_level=logging.WARNING)
            except StartupError:
                self._ahead.end()
                raise
        logger.info(
            "started a Ray for this engine alone, at %s (RAY_ADDRESS is not set); its logs, until "
            "it ends: %s",
            connected_address(), self._ahead.logs if self._ahead else local_ray.logs(),
        )  # fmt: skip

    def keep_off(self, cpus: Collection[int], besides: Collection[int] = ()) -> None:
        """Move the processes of a Ray that was started here away from the compute cores.

        Args:
            cpus: logical CPUs that they may use; without any, nothing is moved.
            besides: processes that stay where they are: the ranks.

        """
        if not (self.is_local and cpus):
            return
        processes = psutil.Process().children(recursive=True)
        if self._ahead is not None:
            processes += self._ahead.processes()
        for process in processes:
            if process.pid not in besides:
                move_process(process.pid, cpus)

    def watch(self, on_end: Callable[[str], object]) -> None:
        """Call back, from another thread, when a Ray that was started here is gone.

        Args:
            on_end: called once, with one line about the process that has ended.

        """
        if not self.is_local:
            return
        if self._ahead is None:
            # Not theirs in turn: another engine's keeper may be among them.
            servers = servers_among(psutil.Process().children(), None)
        else:
            servers = servers_among(self._ahead.processes(), self._ahead.pid)
        self._watch = RayWatch(servers, on_end)

    def close(self) -> None:
        """Leave the cluster, and stop it if it was started here; safe to call twice."""
        if self._watch is not None:
            self._watch.stop()
        if self.is_own_connection and ray.is_initialized():
            if self.is_local and self._ahead is None:
                local_ray.stop()
            else:
                ray.shutdown()
        if self._ahead is not None:
            self._ahead.end()
            self._ahead = None
        self.is_own_connection = False

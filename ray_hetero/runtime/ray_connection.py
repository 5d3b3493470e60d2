"""Connect to the Ray cluster there is, or start a small one of our own and stop it again."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator

import psutil
import ray

from ray_hetero.log import logger
from ray_hetero.runtime.core_binding import move_process
from ray_hetero.runtime.ray_address import connect
from ray_hetero.runtime.ray_arguments import RAY_SETTINGS

OBJECT_STORE_BYTES = 128 << 20
"""Nothing large goes through the object store; Ray's default would take 30 % of the memory."""
OWN_SETTINGS = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_prestart_worker_first_driver": "0",
}
"""Ray's processes wait a minute for a head that is gone to come back; this one's do not.  And a
worker is started for every core at once, which none of the ranks can use: theirs have environments
of their own."""
LINGER_SECONDS = 2.0
"""What Ray's processes get to end by themselves when it has been stopped."""


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
    RayConnection(None)
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
    """Have this process's standard output written line by line, wherever it goes.

    Ray prints the lines of ranks there and flushes none.  In a file or a pipe, as under systemd or
    in a job, they would be seen minutes later, when they fill a block of Python's buffer.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


class RayConnection:
    """This process's connection to Ray; remembers whether it was made, or Ray started, here."""

    def __init__(self, address: str | None) -> None:
        """Connect to `address`, RAY_ADDRESS or the cluster already connected to; else start one.

        Raises:
            StartupError: the address does not answer, or wants another token.

        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self.is_own_connection = not ray.is_initialized()
        self.is_local = False
        if not self.is_own_connection:
            return
        show_lines_at_once()
        address = address or os.environ.get("RAY_ADDRESS") or None
        with _own_handler_kept():
            if address is None:
                self._start_local()
            else:
                connect(address, logging_level=logging.WARNING)

    def _start_local(self) -> None:
        self.is_local = True
        for name, value in (RAY_SETTINGS | OWN_SETTINGS).items():
            os.environ.setdefault(name, value)
        ray.init(
            address="local",
            num_cpus=os.cpu_count(),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=True,
            logging_level=logging.WARNING,
        )
        logger.info("started a local Ray: none was running (RAY_ADDRESS names a cluster)")

    def keep_off(self, cpus: Collection[int], besides: Collection[int] = ()) -> None:
        """Move the processes of a Ray that was started here away from the compute cores.

        Args:
            cpus: logical CPUs that they may use; without any, nothing is moved.
            besides: processes that stay where they are: the ranks.

        """
        if not (self.is_local and cpus):
            return
        for process in psutil.Process().children(recursive=True):
            if process.pid not in besides:
                move_process(process.pid, cpus)

    def close(self) -> None:
        """Leave the cluster, and stop it if it was started here; safe to call twice."""
        if self.is_own_connection and ray.is_initialized():
            processes = _raylet_and_children() if self.is_local else []
            ray.shutdown()
            # Ray kills a raylet that does not end within a second; the raylet's agents then try for
            # a minute to tell the head, which is gone as well.
            _, lingering = psutil.wait_procs(processes, timeout=LINGER_SECONDS)
            for process in lingering:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.is_own_connection = False


def _raylet_and_children() -> list[psutil.Process]:
    raylets = [child for child in psutil.Process().children() if child.name() == "raylet"]
    return [process for raylet in raylets for process in (raylet, *raylet.children(recursive=True))]

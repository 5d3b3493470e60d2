"""A Ray that is started while its engine's process still imports vLLM: a process that keeps it.

The process that starts the engine starts the keeper, a moment before, and tells the engine's
process by a variable where the keeper listens.  The engine connects there and owns the Ray from
then on: it ends with the connection, however the engine ends.  Until then it is the starter's, and
ends when that is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass

import psutil

from ray_hetero.log import logger
from ray_hetero.runtime import local_ray, unix_sockets
from ray_hetero.runtime.credentials import without_secrets
from ray_hetero.runtime.private_folder import PrivateFolder

VARIABLE = "RAY_HETERO_RAY_AHEAD"
"""Environment variable that tells the engine's process where the keeper listens."""
READY_SECONDS = 120.0
"""Longest wait for a Ray that is being started."""
UNCLAIMED_SECONDS = 300.0
"""Seconds that a Ray without an engine is kept: importing vLLM from a slow disk takes long."""
END_SECONDS = 10.0
"""Longest wait for a Ray to end; it takes one or two."""
ANSWER_BYTES = 4096
KEEP = (
    "import sys; descriptor, folder = int(sys.argv[1]), sys.argv[2]; sys.path[:] = sys.argv[3:]; "
    "from ray_hetero.runtime import ray_ahead; sys.excepthook = ray_ahead.say_failure; "
    "ray_ahead.keep(descriptor, folder)"
)
"""Program of the keeper's process, which gets the import path of its starter."""


# --- in the process that starts the engine -----------------------------------------------------

_started: list[RayAhead] = []
"""All that this process has started."""


@functools.cache
def wait_at_exit() -> None:
    """Wait for this process's Rays at its exit, so that its last line comes last.

    Exit handlers run in the reverse order of their registration: this is to be called before one
    ends the engines, and after one prints the reason.
    """
    owner = os.getpid()

    def wait() -> None:
        # Forked children inherit the handler.
        if os.getpid() == owner:
            for ahead in _started:
                ahead.wait()

    atexit.register(wait)


class RayAhead:
    """A Ray that is on its way up for an engine that is about to start."""

    def __init__(self) -> None:
        with unix_sockets.unix_socket(READY_SECONDS) as listener:
            # From here on an engine can connect, and wait for what it is told.
            self.address = unix_sockets.bind_abstract(listener).decode()
            self._folder = PrivateFolder()
            words = [str(listener.fileno()), str(self._folder.path), *sys.path]
            self.process = subprocess.Popen(
                [sys.executable, "-c", KEEP, *words],
                env=without_secrets(os.environ),
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                # Ctrl-C is for the engine, which ends its Ray when its ranks have ended.  Not a new
                # session: the kernel shares cores out between sessions first (autogroups), so that
                # an engine that polls would get twice as much of a core as the rank on it, and none
                # of its `sched_yield` would give the core to that rank.
                process_group=0,
            )
            """Process that starts Ray, and keeps it."""
        self._thread = threading.Thread(target=self._wait, daemon=True, name="RayAhead")
        self._thread.start()
        _started.append(self)

    @property
    def folder(self) -> str:
        """Path of its folder, which is there as long as it is."""
        return str(self._folder.path)

    def end(self) -> None:
        """End it, where there will be no engine."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait(self) -> None:
        """Wait until it is gone, with its folder; it ends a moment after its engine."""
        self.end()
        self._thread.join(END_SECONDS)

    def _wait(self) -> None:
        """Leave no zombie, whenever it ends, and no folder where it was killed."""
        self.process.wait()
        self._folder.remove()


# --- in the engine's process -------------------------------------------------------------------


@dataclass(frozen=True)
class OwnedRay:
    """A Ray that was started ahead, and is this process's from now on."""

    connection: socket.socket
    pid: int
    """Process id of this Ray's keeper."""
    address: str
    """Address of this Ray, for `ray.init`."""
    logs: str
    """Folder of its logs."""

    @classmethod
    def claimed(cls) -> OwnedRay | None:
        """The Ray that was started for this process; None where there is none, or it has failed."""
        name = os.environ.pop(VARIABLE, None)
        if name is None:
            return None
        connection = unix_sockets.unix_socket(READY_SECONDS)
        try:
            unix_sockets.connect(connection, name.encode())
            # Once a keeper is gone, anybody may listen in its place.
            is_ours = unix_sockets.user_of(connection) == os.getuid()
            answer = connection.recv(ANSWER_BYTES) if is_ours else b""
        except OSError as error:
            connection.close()
            logger.info(
                "the Ray that was started ahead is gone (%s): another one is started", error
            )
            return None
        if not answer:
            connection.close()
            logger.info("the Ray that was started ahead has ended: another one is started")
            return None
        return cls(connection, **json.loads(answer))

    def processes(self) -> list[psutil.Process]:
        """Keeper of this Ray and all processes below it: Ray's own and its workers."""
        try:
            keeper = psutil.Process(self.pid)
            return [keeper, *keeper.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def end(self) -> None:
        """End it, and wait until it is gone."""
        processes = self.processes()
        self.connection.settimeout(END_SECONDS)
        try:
            self.connection.shutdown(socket.SHUT_WR)
            # Nothing more is said: this waits for the end of the keeper.
            self.connection.recv(ANSWER_BYTES)
        except TimeoutError:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        except OSError:
            # It is gone already.
            pass
        finally:
            self.connection.close()


# --- in the keeper's process -------------------------------------------------------------------


def say_failure(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """Say in one line why this process ends: Ray raises errors of no kind, and the engine goes on.

    For `sys.excepthook`.
    """
    reason = (str(error).strip() or kind.__name__).splitlines()[0]
    logger.warning(
        "Ray, started ahead of the engine, has failed, so that the engine starts another one: %s",
        reason,
    )


def keep(descriptor: int, folder: str) -> None:
    """Start a Ray, hand it to the engine that asks for it, and stop it when that is gone.

    Args:
        descriptor: of the socket that listens for the engine.
        folder: path of the `PrivateFolder` for this Ray's files.

    """
    listener = socket.socket(fileno=descriptor)
    address = local_ray.start(log_to_driver=False, folder=folder)
    # Ray's own handler ends it at once, and a service manager may tell all processes of a service.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    # The engine waits for the end of its connection, which is that of this process.
    owner = _owner(listener)
    if owner is not None:
        # It may be gone at any moment.
        with contextlib.suppress(OSError):
            told = {"pid": os.getpid(), "address": address, "logs": local_ray.logs()}
            owner.sendall(json.dumps(told).encode())
            owner.recv(ANSWER_BYTES)
    local_ray.stop()


def _owner(listener: socket.socket) -> socket.socket | None:
    """The engine, once it asks; None where its starter is gone, or none has asked in time."""
    poll = select.poll()
    for file in (listener, sys.stdin):
        poll.register(file, select.POLLIN)
    ready = [descriptor for descriptor, _ in poll.poll(UNCLAIMED_SECONDS * 1000)]
    if listener.fileno() not in ready:
        return None
    # Strangers may have come before it; nor does the limit of the starter's own end hold here.
    listener.settimeout(UNCLAIMED_SECONDS)
    with listener:
        owner = unix_sockets.accepted(listener)
    owner.settimeout(None)
    return owner

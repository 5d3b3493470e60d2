"""A small Ray of this host, started and stopped by one of this project's processes; its token."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._raylet import Config  # type: ignore[attr-defined]

from ray_hetero.errors import StartupError
from ray_hetero.log import logger
from ray_hetero.runtime.credentials import withheld
from ray_hetero.runtime.private_folder import PrivateFolder
from ray_hetero.runtime.ray_address import MODE
from ray_hetero.runtime.ray_arguments import RAY_SETTINGS

OBJECT_STORE_BYTES = 128 << 20
"""Bytes of the object store: nothing large goes through it; Ray's default takes 30 % of memory."""
OWN_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_prestart_worker_first_driver": "0",
}
"""Ray's processes wait a minute for a head that is gone to come back; this one's do not.  And a
worker is started for every core at once, which none of the ranks can use: theirs have environments
of their own."""
ATTEMPTS = 3
"""Starts of Ray that are tried at most."""
OUT_OF_TIME = "timed out during startup"
"""Words of the error, of no kind of its own, that `ray._private.node.Node` raises where its head
does not know its raylet within 30 s: a limit that no setting changes and a busy host exceeds."""
LINGER_SECONDS = 2.0
"""Seconds that Ray's processes get to end by themselves when it has been stopped."""
_folders: dict[int, PrivateFolder] = {}
"""Folder of the Ray that a process has started, by the process's id: a forked one has none."""
TOKEN_BYTES = 32
ELSEWHERE = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Variables by which a user gives Ray a token that is not in the usual file."""


def settle_environment() -> None:
    """Set what Ray reads from the environment; what the user has set stays."""
    for name, value in (RAY_SETTINGS | OWN_SETTINGS).items():
        os.environ.setdefault(name, value)


def start(*, log_to_driver: bool = True, folder: str = "") -> str:
    """Start a Ray and connect to it; its address.

    Its logs and sockets are in a folder of this user's, until it is stopped.  Its processes get no
    variable that holds a secret, except Ray's own token.

    Args:
        log_to_driver: whether lines of its workers come out of this process.
        folder: path of a `PrivateFolder` for its files; a new one by default.

    Raises:
        StartupError: Ray was not up in time, `ATTEMPTS` times; see also `ask_for_token`.

    """
    settle_environment()
    ask_for_token()
    own = _folders[os.getpid()] = PrivateFolder(folder)
    try:
        with withheld():
            init_in(
                own.path,
                address="local",
                num_cpus=os.cpu_count(),
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=log_to_driver,
                logging_level=logging.WARNING,
            )
    except StartupError:
        _folders.pop(os.getpid()).remove()
        raise
    return str(ray.get_runtime_context().gcs_address)


def init_in(folder: Path, **options: Any) -> None:
    """Start a Ray whose files are in `folder` and connect to it, again if Ray was not up in time.

    Args:
        folder: of no other Ray; Ray gives its own part of it to all users.
        options: of `ray.init`.

    Raises:
        StartupError: Ray was not up in time, `ATTEMPTS` times.

    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            ray.init(**options, _temp_dir=str(folder / "r"))
            return
        except Exception as error:
            if OUT_OF_TIME not in str(error):
                raise
            _kill_those_of(folder)
            logger.warning(
                "Ray was not up within its own limit of 30 s (attempt %d of %d): this host may be "
                "busy", attempt, ATTEMPTS,
            )  # fmt: skip
    raise StartupError(
        f"expected a Ray of this host within {ATTEMPTS} × 30 s, found: {ATTEMPTS} times it was not "
        "up in time. Look with `top` for what keeps the host busy and start again; or type `ray "
        "start --head` and then the command again with RAY_ADDRESS=127.0.0.1:6379"
    )


def _kill_those_of(folder: Path) -> None:
    """Kill the processes that a failed start has left: children that name `folder`, all below."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(str(folder) in argument for argument in child.cmdline()):
                for process in (*child.children(recursive=True), child):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                child.wait()


def logs() -> str:
    """Folder of the logs of the Ray that this process has started."""
    return str(_folders[os.getpid()].path / "r" / "session_latest" / "logs")


def stop() -> None:
    """Stop the Ray that this process has started.

    Ray kills a raylet that does not end within a second; the raylet's agents then try for a minute
    to tell the head, which is gone as well.
    """
    raylets = [child for child in psutil.Process().children() if child.name() == "raylet"]
    processes = [
        process for raylet in raylets for process in (raylet, *raylet.children(recursive=True))
    ]
    ray.shutdown()
    _, lingering = psutil.wait_procs(processes, timeout=LINGER_SECONDS)
    for process in lingering:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if own := _folders.pop(os.getpid(), None):
        own.remove()


def _stop_late() -> None:
    """Stop at exit what nobody has stopped: a Ray that several engines had in common."""
    if os.getpid() in _folders:
        stop()


# Before Ray's own exit handler, which was there earlier, and after those of engines.
atexit.register(_stop_late)


def ask_for_token() -> None:
    """Let the Ray that this process starts next ask for a token, unless the user has forbidden it.

    Ray 2.60 does so by itself; earlier ones, from 2.55 on, only when they are told.  All of them
    write a new token by the umask, so that others could often read it: so it is written here.

    Raises:
        StartupError: the file cannot be written.

    """
    mode = os.environ.setdefault(MODE, "token")
    # Ray has read the variable already, when it was imported.
    Config.initialize("")
    if mode.lower() == "token" and not any(os.environ.get(name) for name in ELSEWHERE):
        path = Path.home() / ".ray" / "auth_token"
        try:
            _make(path)
            _warn_of_readers(path)
        except OSError as error:
            raise StartupError(
                f"expected to write Ray's token to {path}, found: {error.strerror}. Type: export "
                f"RAY_AUTH_TOKEN=$(openssl rand -hex {TOKEN_BYTES})"
            ) from None


def _make(path: Path) -> None:
    """Write a new token, unless there is one; of several processes the first one's stays."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = path.with_name(f".auth_token.{os.getpid()}")
    try:
        descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(TOKEN_BYTES))
        with suppress(FileExistsError):
            os.link(own, path)
    finally:
        own.unlink(missing_ok=True)


def _warn_of_readers(path: Path) -> None:
    """Say so if other users can read a token that was there before."""
    readable = (stat.S_IROTH | stat.S_IRGRP) & path.stat().st_mode
    if readable and path.parent.stat().st_mode & (stat.S_IXOTH | stat.S_IXGRP):
        logger.warning(
            "other users of this host can read Ray's token and with it run code as you. Type: "
            "chmod go= %s %s", path.parent, path,
        )  # fmt: skip

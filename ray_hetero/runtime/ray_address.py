"""Addresses of Ray clusters: those of this user's on this host, and connecting to one of them."""

from __future__ import annotations

import os
import re
import socket
from typing import Any
from urllib.parse import urlsplit

import psutil
import ray
from ray.exceptions import AuthenticationError

from ray_hetero.errors import StartupError

MODE = "RAY_AUTH_MODE"
HEAD_PORT = 6379
"""Port on which `ray start --head` listens unless it is told otherwise."""
LISTENING_SECONDS = 5.0
"""Longest wait for the port to be open; Ray itself would try for minutes."""
WHERE_IT_GOES = (
    "the cluster's token in RAY_AUTH_TOKEN or ~/.ray/auth_token (`ray get-auth-token` prints it "
    "on a host that has it)"
)
RAYLET = "raylet"
ARGUMENT = "--gcs-address="


def connect(address: str, **options: Any) -> None:
    """Connect this process to a running cluster.

    Args:
        address: host:port of its head, or `auto` for the one on this host.
        options: for `ray.init`.

    Raises:
        StartupError: it is the address of a dashboard, nobody listens there, or the cluster wants
            another token.

    """
    _check_is_of_head(address)
    _check_listening(address)
    try:
        ray.init(address=address, **options)
    except AuthenticationError:
        raise StartupError(
            f"no Ray token for {address!r}: {MODE} is 'token', and this process has none. "
            f"Put {WHERE_IT_GOES}, or type: unset {MODE}"
        ) from None
    except ConnectionError as error:
        raise StartupError(_refused(address, str(error))) from None


def _check_is_of_head(address: str) -> None:
    if not address.startswith(("http://", "https://")):
        return
    host = urlsplit(address).hostname or "HOST"
    raise StartupError(
        f"expected host:port of a Ray head in RAY_ADDRESS, found {address!r}, the address of its "
        f"dashboard, which is for `ray job`. Type: export RAY_ADDRESS={host}:{HEAD_PORT}, or on "
        "one of its nodes: unset RAY_ADDRESS"
    )


def is_listening(address: str) -> bool:
    """Whether a head still listens; True where the address names none, like `auto`.

    Args:
        address: host:port of the head.

    """
    try:
        _check_listening(address)
    except StartupError:
        return False
    return True


def _check_listening(address: str) -> None:
    place = _host_and_port(address)
    if place is None:
        return
    try:
        socket.create_connection(place, timeout=LISTENING_SECONDS).close()
    except OSError as error:
        raise StartupError(_nobody(address, str(error))) from None


def _host_and_port(text: str) -> tuple[str, int] | None:
    found = re.search(r"(?:^|\s)([\w.-]+):(\d+)$", text)
    return (found[1], int(found[2])) if found else None


def _nobody(address: str, reason: str) -> str:
    return (
        f"no Ray cluster answers at {address!r} (RAY_ADDRESS): {reason.rstrip('.')}. To start one, "
        "type: ray start --head $(ray-hetero ray-args). An engine without RAY_ADDRESS starts its "
        "own."
    )


def _refused(address: str, reason: str) -> str:
    """Ray says the same whether nobody answers or the token is wrong; here the port was open."""
    if _host_and_port(address) is None and _host_and_port(reason) is None:
        return _nobody(address, "none runs on this host" if address == "auto" else reason)
    mode = os.environ.get(MODE)
    if mode == "token":
        return (
            f"the Ray cluster at {address!r} does not take this process's token. Put "
            f"{WHERE_IT_GOES}"
        )
    return (
        f"the Ray cluster at {address!r} asks for a token, and {MODE} is "
        f"{'not set' if mode is None else repr(mode)} here. Type: export {MODE}=token, and put "
        f"{WHERE_IT_GOES}"
    )


def local_addresses() -> tuple[str, ...]:
    """host:port of each cluster's head, the oldest first."""
    found: dict[str, float] = {}
    for process in psutil.process_iter():
        try:
            if process.name() != RAYLET or process.uids().real != os.getuid():
                continue
            address = _address(process.cmdline())
            if address is not None:
                found.setdefault(address, process.create_time())
        except psutil.Error:  # gone meanwhile, or another user's
            continue
    return tuple(sorted(found, key=lambda address: found[address]))


def _address(command: list[str]) -> str | None:
    return next((one.removeprefix(ARGUMENT) for one in command if one.startswith(ARGUMENT)), None)

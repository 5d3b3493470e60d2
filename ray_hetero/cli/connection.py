"""The Ray cluster that a command asks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TRIES = "4"
"""Tries of a connection, a second each, of which Ray makes 20.  Only a head that is still starting
needs them, or one that wants another token, for which a command would wait in vain."""


def addresses() -> tuple[str, ...]:
    """The cluster of RAY_ADDRESS, else all of this host; "auto", which says so, if there is none.

    Several engines on a host may have a Ray each.
    """
    _settle_environment()
    from ray_hetero.runtime.ray_address import local_addresses

    named = os.environ.get("RAY_ADDRESS")
    return (named,) if named else local_addresses() or ("auto",)


@contextmanager
def cluster(address: str | None = None) -> Iterator[None]:
    """Connect to a cluster for a command's time.

    Args:
        address: host:port of its head; None is that of RAY_ADDRESS, else this host's.

    Raises:
        StartupError: none answers, or it wants another token.

    """
    _settle_environment()
    import logging

    import ray

    from ray_hetero.runtime.ray_address import connect

    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    connect(address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def _settle_environment() -> None:
    """Use this user's token, if there is one, and few tries; Ray reads both when it is imported.

    A Ray that an engine starts for itself asks for a token, and a cluster that asks for none does
    not mind.
    """
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", TRIES)
    places = (os.environ.get("RAY_AUTH_TOKEN_PATH"), Path.home() / ".ray" / "auth_token")
    if os.environ.get("RAY_AUTH_TOKEN") or any(place and Path(place).exists() for place in places):
        os.environ.setdefault("RAY_AUTH_MODE", "token")

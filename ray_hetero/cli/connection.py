"""The Ray cluster that a command asks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def cluster() -> Iterator[None]:
    """Connect to the cluster of RAY_ADDRESS, else to this host's, for a command's time.

    Raises:
        StartupError: none answers, or it wants another token.

    """
    _use_token()
    import logging

    import ray

    from ray_hetero.runtime.ray_address import connect

    address = os.environ.get("RAY_ADDRESS") or "auto"
    connect(address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def _use_token() -> None:
    """Use this user's token, if there is one; Ray reads the mode when it is imported.

    A Ray that an engine starts for itself asks for one, and a cluster that asks for none does not
    mind.
    """
    places = (os.environ.get("RAY_AUTH_TOKEN_PATH"), Path.home() / ".ray" / "auth_token")
    if os.environ.get("RAY_AUTH_TOKEN") or any(place and Path(place).exists() for place in places):
        os.environ.setdefault("RAY_AUTH_MODE", "token")

"""Environment variables of the user's process that vLLM reads while it makes an engine.

vLLM asks for the model runner and for the way to start processes by environment variables, and the
processes of an engine inherit them.  A notebook's process lives on, and its next engine may be
vLLM's own.  So what is set here is taken back once the engine's processes are there, or when there
will be none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ray_hetero.compat.patching import original

_before: dict[str, str | None] = {}
"""Values that the variables had before this process set them, by name; None for unset ones."""


def put(name: str, value: str) -> None:
    """Set a variable until `take_back`."""
    _before.setdefault(name, os.environ.get(name))
    os.environ[name] = value


def take_back() -> None:
    """Give every variable that was set the value that it had, in what vLLM remembers too.

    Uses: `envs.disable_envs_cache`, `envs.enable_envs_cache`, `envs._is_envs_cache_enabled`: an
    engine inside of this process makes vLLM remember all variables.
    """
    if not _before:
        return
    while _before:
        name, value = _before.popitem()
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    from vllm import envs

    if original(envs, "_is_envs_cache_enabled")():
        envs.disable_envs_cache()
        envs.enable_envs_cache()


@contextmanager
def kept_on_success() -> Iterator[None]:
    """Take variables back where what is inside fails; else they wait for the engine."""
    is_done = False
    try:
        yield
        is_done = True
    finally:
        if not is_done:
            take_back()

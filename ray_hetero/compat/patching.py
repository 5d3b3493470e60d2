"""Start of every patch of vLLM: the upstream name, or an error that says it is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray_hetero.errors import UnsupportedError


def original(owner: Any, name: str) -> Any:
    """The object that a patch replaces.

    Raises:
        UnsupportedError: upstream renamed it.

    """
    try:
        return getattr(owner, name)
    except AttributeError:
        where = getattr(owner, "__qualname__", getattr(owner, "__name__", owner))
        raise UnsupportedError(
            f"ray_hetero does not work with this vLLM: {where}.{name} is gone. "
            "Install a supported version (`ray-hetero doctor` names them)."
        ) from None


STOCK = "__ray_hetero_stock__"
"""Attribute of a patch that holds what the patch stands for."""


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put a patch in the place of an object of vLLM's, or of an earlier patch in its place.

    Args:
        owner: a module, a class or an object.
        name: of what is replaced there.
        make: makes the patch, a function, from vLLM's own object.

    Raises:
        UnsupportedError: upstream renamed it.

    """
    found = original(owner, name)
    stock = getattr(found, STOCK, found)
    patch = make(stock)
    # A static method is asked for what it stands for through its class, which gives the function.
    setattr(getattr(patch, "__func__", patch), STOCK, stock)
    setattr(owner, name, patch)

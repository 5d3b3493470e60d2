"""What every patch of vLLM begins with: the upstream name, or an error that says it is gone."""

from __future__ import annotations

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

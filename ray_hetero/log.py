"""The logger of this package, which every module and process of it uses."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.ray_hetero")
"""Logger below vLLM's own, so that its level, format and handlers hold; imports no vLLM."""


def adopt(package: str) -> None:
    """Let the messages of a package that knows no vLLM come out as those of this one do."""
    logging.getLogger(package).parent = logger

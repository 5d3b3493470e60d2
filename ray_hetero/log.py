"""The logger of this package, which every module and process of it uses."""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger("vllm.ray_hetero")
"""Logger below vLLM's own, so that its level, format and handlers hold; imports no vLLM."""


_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
_DATE = "%m-%d %H:%M:%S"


def show_without_vllm() -> None:
    """Write this package's messages out in a process that does not import vLLM.

    vLLM's variables for level, stream and whether to log at all hold.  What vLLM sets up when it is
    imported after all replaces this.
    """
    if os.environ.get("VLLM_CONFIGURE_LOGGING", "1") == "0":
        return
    is_error = os.environ.get("VLLM_LOGGING_STREAM") == "ext://sys.stderr"
    handler = logging.StreamHandler(sys.stderr if is_error else sys.stdout)
    handler.setFormatter(logging.Formatter(_FORMAT, _DATE))
    of_vllm = logging.getLogger("vllm")
    of_vllm.setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper())
    of_vllm.addHandler(handler)
    of_vllm.propagate = False


def adopt(package: str) -> None:
    """Let the messages of a package that knows no vLLM come out as those of this one do."""
    logging.getLogger(package).parent = logger

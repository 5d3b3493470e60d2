"""Use of Triton's kernels, where Triton is installed and works."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import subprocess
from collections.abc import Callable
from typing import Any

from ray_hetero.log import logger


@functools.cache
def kernels() -> Any:
    """Import the kernels, when one is first used: builds for CPUs alone have no Triton."""
    return importlib.import_module("ray_hetero.offload.expand.triton_kernels")


def runs_with_triton(is_right: Callable[[], bool], instead: str) -> bool:
    """Whether a kernel of Triton can be used; where Triton is installed and fails, a warning.

    Args:
        is_right: runs the kernel, and says whether torch's operators give the same.
        instead: consequence, for the warning.

    """
    if importlib.util.find_spec("triton") is None:
        return False
    triton_error = importlib.import_module("triton.errors").TritonError
    try:
        found = is_right()
    except (RuntimeError, OSError, subprocess.SubprocessError, triton_error) as error:
        # Triton builds a launcher with the host's compiler, and reads the driver's library.
        logger.warning(
            "%s because Triton cannot be used here: %s",
            instead,
            (str(error).splitlines() or [repr(error)])[0],
        )
        return False
    assert found, "the kernel and torch's operators expand a weight differently"
    return True

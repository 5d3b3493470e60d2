"""CUDA with the node's GPUs, in the process of a CPU rank that shows none to anybody else.

Whether a process has GPUs is decided once and for all by CUDA_VISIBLE_DEVICES when CUDA's driver
is initialised.  vLLM must find none in a CPU rank, and asks in ways that initialise it.  So a rank
that is to have a prompt GPU does that when this module is imported, before torch and vLLM are, with
the variable out of the way.
"""

from __future__ import annotations

import ctypes
import os

VARIABLE = "RAY_HETERO_SEES_GPUS"
"""Environment variable of a CPU rank whose prompts a GPU may compute."""
HIDING = "CUDA_VISIBLE_DEVICES"


def _initialise() -> str:
    """Obstacle to the use of GPUs; empty if there is none."""
    if os.environ.get(VARIABLE) != "1":
        return "this process was started without GPUs"
    hidden = os.environ.pop(HIDING, None)
    try:
        status = ctypes.CDLL("libcuda.so.1").cuInit(0)
    except OSError as error:
        return str(error)
    finally:
        if hidden is not None:
            os.environ[HIDING] = hidden
    return f"CUDA's driver says error {status} (CUresult)" if status else ""


PROBLEM = _initialise()

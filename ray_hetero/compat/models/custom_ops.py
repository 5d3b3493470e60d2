"""vLLM's wrappers of its native operators on a CPU rank; their module is a private one.

Uses: `_custom_ops`.
"""

from __future__ import annotations

import torch
from vllm import _custom_ops as vllm_ops

__all__ = ["vllm_ops"]


def has_cpu_kernels() -> bool:
    """Whether vLLM's CPU kernels are in this process: a build for CUDA has none.

    They are known by vLLM's operator for experts.
    """
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return hasattr(torch.ops._C, "cpu_fused_moe")

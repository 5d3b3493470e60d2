"""vLLM's wrappers of its native operators on a CPU rank; their module is a private one.

Uses: `_custom_ops`.
"""

from __future__ import annotations

import functools

import torch
from vllm import _custom_ops as vllm_ops

__all__ = ["rounds", "vllm_ops"]


@functools.cache
def rounds() -> bool:
    """Whether vLLM's operators round to bfloat16 on this processor.

    Without AVX512-BF16 they cut it off: each result is smaller by 0.28 % in the mean.
    """
    return bool(torch.cpu._is_avx512_bf16_supported())


def has_cpu_kernels() -> bool:
    """Whether vLLM's CPU kernels are in this process: a build for CUDA has none.

    They are known by vLLM's operator for experts.
    """
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return hasattr(torch.ops._C, "cpu_fused_moe")

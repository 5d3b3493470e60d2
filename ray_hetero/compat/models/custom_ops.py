"""vLLM's wrappers of its native operators on a CPU rank; their module is a private one.

Uses: `_custom_ops`.
"""

from __future__ import annotations

from vllm import _custom_ops as vllm_ops

__all__ = ["vllm_ops"]

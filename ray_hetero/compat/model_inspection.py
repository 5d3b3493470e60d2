"""vLLM's model registry: where it looks at what the class of a model can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray_hetero.compat.patching import replace


def inspect_here() -> None:
    """On a CPU platform, let the registry look at a model's class in this process.

    Replaces: `registry._run_in_subprocess` of vllm.model_executor.models.
    Why: an architecture that its cache does not know is looked at in a process of its own, which
    imports vLLM once more, about ten seconds of a first start.  That is to keep CUDA from being
    initialised by the import of a model, which without GPUs cannot happen.
    Can go when: vLLM looks in the same process where its platform is the CPU.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        replace(registry, "_run_in_subprocess", lambda stock: _run_here)


def _run_here(function: Callable[[], Any]) -> Any:
    return function()

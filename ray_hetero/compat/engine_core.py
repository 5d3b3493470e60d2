"""vLLM's engine process: what its loop asks when a step raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray_hetero.compat.patching import original

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def ask_when_a_step_fails(vllm_config: VllmConfig, sentinel: type) -> None:
    """In the engine's process: let its loop ask our sentinel what to do about an error.

    Why: fault_tolerant_wrapper asks one, but only under --enable-fault-tolerance, which is for
    data parallelism behind an external load balancer; and vLLM's own gives up once an executor
    has failed.
    Can go when: an executor can bring its own sentinel.
    """
    from vllm.v1.engine import core

    original(core, "EngineCoreSentinel")
    core.EngineCoreSentinel = sentinel
    original(vllm_config.parallel_config, "enable_fault_tolerance")
    vllm_config.parallel_config.enable_fault_tolerance = True

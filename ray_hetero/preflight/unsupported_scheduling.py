"""Engines whose steps cannot be scheduled before the tokens of those before them are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from placement.cluster.layout import Layout
from ray_hetero.compat.worker.late_tokens import SCHEDULER
from ray_hetero.config import HeteroConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Scheduling:
    """An engine with CPU ranks or unequal stages, as far as its scheduler depends on it."""

    vllm_config: VllmConfig
    """The driver's."""
    config: HeteroConfig
    layout: Layout
    is_asked: bool | None
    """Whether the user asks for asynchronous scheduling; None where nothing is said."""


def obstacle(scheduling: Scheduling) -> str | None:
    """Obstacle to an engine's asynchronous scheduling; None if there is none."""
    vllm_config = scheduling.vllm_config
    batches = scheduling.config.pipeline.batches_in_flight
    if len(scheduling.layout.stages) == 1:
        return "a layout of one stage"
    if scheduling.config.cpu.model_runner == "v2":
        return "cpu.model_runner v2"
    if vllm_config.speculative_config is not None:
        return "--speculative-config"
    if vllm_config.model_config.runner_type != "generate":
        return f"--runner {vllm_config.model_config.runner_type}"
    # Who names the class that this would set asks for the same.
    if vllm_config.scheduler_config.scheduler_cls not in (None, SCHEDULER):
        return "--scheduler-cls"
    if batches != "auto" and batches > 1:
        return f"pipeline.batches_in_flight {batches}"
    if scheduling.config.objective != "latency":
        return f"objective {scheduling.config.objective}"
    return None


def obstacle_to_what_is_asked(scheduling: Scheduling) -> str | None:
    """Obstacle to the asynchronous scheduling that the user asks for."""
    return obstacle(scheduling) if scheduling.is_asked else None

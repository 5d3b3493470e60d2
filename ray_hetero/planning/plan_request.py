"""One engine to plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from placement.cluster.assignment import ALONE, Turn
from placement.cluster.layout import Layout
from ray_hetero.config import HeteroConfig
from ray_hetero.planning.engine_facts import EngineFacts
from ray_hetero.planning.expert_ranks import with_expert_ranks
from ray_hetero.planning.machine import Machine
from ray_hetero.preflight.unsupported_checkpoints import CheckpointOnCpus


@dataclass(frozen=True)
class PlanRequest:
    """An engine to plan: the user's configuration, a machine, and a model with its limits."""

    config: HeteroConfig
    machine: Machine
    facts: EngineFacts
    pipeline_parallel_size: int = 1
    """Stages."""
    tensor_parallel_size: int = 1
    """Ranks of the largest stage."""
    partition: str | None = None
    """VLLM_PP_LAYER_PARTITION, if set."""
    turn: Turn = ALONE
    """Place of the engine among those that start together."""
    checkpoint: CheckpointOnCpus | None = None
    """Model as refusals look at it; None refuses no layout that is chosen."""
    explained: bool = True
    """Whether an error says by how much a model does not fit, which takes many times as long as
    planning."""

    @property
    def world_size(self) -> int:
        """Number of ranks, without expert ranks."""
        return self.pipeline_parallel_size * self.tensor_parallel_size

    def with_experts(self, ranks: int) -> PlanRequest:
        """The request with a number of expert ranks; 0 is none."""
        return replace(self, config=with_expert_ranks(self.config, ranks))

    def with_layout(self, layout: Layout) -> PlanRequest:
        """The request with stages written out, whose layers are the planner's choice."""
        stages = [list(stage) for stage in layout.stages]
        return replace(
            self,
            config=self.config.model_copy(update={"layout": stages}),
            pipeline_parallel_size=len(stages),
            tensor_parallel_size=layout.tensor_parallel_size,
            partition=None,
        )

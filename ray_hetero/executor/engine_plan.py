"""The executor's step `plan`: all decisions of an engine before it reserves any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from placement.cluster.assignment import Node, Turn
from placement.cluster.external_group import describe_group
from placement.cluster.layout import Layout
from placement.cluster.ray_cluster import ExternalGroup
from placement.errors import LayoutError
from placement.plan.encoders import encoder_line
from ray_hetero.compat.engine import engine_args, long_prompts, shared_batches
from ray_hetero.compat.worker import late_tokens, layer_partition
from ray_hetero.errors import ConfigError
from ray_hetero.log import logger
from ray_hetero.observability.engine_info import EngineInfo, info_of
from ray_hetero.observability.world_table import as_text, placement_table
from ray_hetero.planning import world_plan
from ray_hetero.planning.cluster_measurements import bandwidth_probe, rows_probe
from ray_hetero.planning.engine_facts import EngineFacts, facts_of
from ray_hetero.planning.expert_source import expert_source
from ray_hetero.planning.layer_plan import plan_layers
from ray_hetero.planning.machine import Machine
from ray_hetero.planning.plan_request import PlanRequest
from ray_hetero.planning.planned_layers import LayerPlan, describe_split
from ray_hetero.planning.rank_devices import reads_over_link
from ray_hetero.planning.rank_specs import rank_specs, spare_cpus
from ray_hetero.preflight.refusal import refuse_first
from ray_hetero.preflight.refusals import (
    DRAFTING_OF_CPU_RANKS,
    ENGINES_OF_CPU_RANKS,
    SCHEDULING_OF_CPU_RANKS,
)
from ray_hetero.preflight.refused_models import refuse_drafts, refuse_ranks
from ray_hetero.preflight.refused_stages import refuse_divided_layers, refuse_heads
from ray_hetero.preflight.unsupported_checkpoints import CheckpointOnCpus
from ray_hetero.preflight.unsupported_drafters import Drafting
from ray_hetero.preflight.unsupported_runner import RANKS_OF_V2_RUNNER, RunBy
from ray_hetero.preflight.unsupported_scheduling import Scheduling, obstacle
from ray_hetero.worker import mixed_groups
from ray_hetero.worker.rank_config import shared_settings
from ray_hetero.world import EngineSpec, RankSpec, SharedSettings, World


@dataclass(frozen=True)
class EnginePlan:
    """Decisions of the step `plan`, which hold for all generations of ranks."""

    layers: LayerPlan
    specs: tuple[RankSpec, ...]
    """Specification that each rank is started with, by rank."""
    memory_bytes: dict[int, int]
    """Host memory that each CPU rank will take, by rank; none where nothing is known."""
    spare_here: tuple[int, ...]
    """Logical CPUs of the driver's node that no CPU rank computes on."""
    info: EngineInfo
    reads_over_link: bool
    """Whether steps of many tokens read weights of CPU ranks or expert ranks over a GPU's link."""
    locality: str | None
    """Statement of which sockets are near the GPUs that they feed; None where nothing is known."""
    encoders: str
    """Statement of where images and sound are encoded; empty where the model has no encoders."""

    @property
    def world(self) -> World:
        """All ranks of the engine."""
        return self.layers.world

    @property
    def schedules_ahead(self) -> bool:
        """Whether the driver schedules a step while the ranks compute the one before it."""
        return self.specs[0].shared.schedules_ahead

    def log(self) -> None:
        """Say what was decided, and what speaks against it."""
        sharing = world_plan.sharing_warning(self.world.members)
        planned = self.layers.warning
        if planned and self.layers.is_too_large:
            planned = f"the plan expects a rank to run out of memory, and goes on: {planned}"
        for warning in filter(None, (planned, sharing)):
            logger.warning(warning)
        logger.info("\n%s", as_text(placement_table(self.world, self.layers.threads)))
        for line in filter(None, (self.locality, *describe_split(self.layers), self.encoders)):
            logger.info("plan: %s", line)
        if self.schedules_ahead:
            logger.info(
                "plan: each step is scheduled while the one before it is computed "
                "(--no-async-scheduling: behind it)"
            )


class EnginePlanner:
    """Plans an engine on a cluster's nodes, and sets vLLM's configuration accordingly.

    Args:
        vllm_config: the engine's.
        spec: what the user has asked for.
        turn: the engine's place among those that start together.
        partition: VLLM_PP_LAYER_PARTITION as the user has set it.
        external: the placement group around the engine, if there is one.

    """

    def __init__(
        self, vllm_config: Any, spec: EngineSpec, turn: Turn, partition: str | None,
        external: ExternalGroup | None,
    ) -> None:  # fmt: skip
        self._vllm_config = vllm_config
        self._spec = spec
        self._config = spec.config
        self._turn = turn
        self._partition = partition
        self._external = external

    def plan(self, nodes: Sequence[Node]) -> EnginePlan:
        """Plan, refuse what cannot work, and set what follows from it.

        Args:
            nodes: what the engine may use.

        Raises:
            PlacementError: there are too few devices, or the model does not fit on them.
            RayHeteroError: the model or the configuration does not work on these ranks.

        """
        vllm_config = self._vllm_config
        self._forget_scheduler()
        facts = facts_of(vllm_config)
        plan = self._layer_plan(nodes, facts)
        self._refuse(plan.world)
        self._settle_dtype(plan.world)
        shared = self._shared_settings(plan.world)
        # The driver's own copy of the configuration answers questions about layers too.
        layer_partition.set_partition(plan.world.layers)
        if shared.schedules_ahead:
            # The next one waits at the ranks while one is computed.
            engine_args.limit_batches_in_flight(vllm_config, 2)
            late_tokens.schedule_ahead(vllm_config)
        else:
            batches = self._batches_in_flight(plan.world)
            engine_args.limit_batches_in_flight(vllm_config, batches)
            self._share_batches()
        self._lengthen_steps(plan.world)
        here = ray.get_runtime_context().get_node_id()
        source = expert_source(vllm_config) if plan.world.experts else None
        return EnginePlan(
            plan,
            rank_specs(plan, nodes, self._spec, shared, source),
            plan.memory_bytes(),
            next((spare_cpus(plan, node) for node in nodes if node.node_id == here), ()),
            info_of(
                vllm_config.instance_id,
                vllm_config.model_config.model,
                plan,
                facts.shape,
                self._spec.metrics_path,
            ),
            reads_over_link(self._config, plan.world, nodes, is_bf16=facts.is_bf16),
            world_plan.locality_line(plan.world.seats, {node.node_id: node.host for node in nodes}),
            "" if facts.shape is None else encoder_line(facts.shape, plan.world.layout),
        )

    def _layer_plan(self, nodes: Sequence[Node], facts: EngineFacts) -> LayerPlan:
        parallel, timeout_s = self._vllm_config.parallel_config, self._config.placement.timeout_s
        machine = Machine(
            tuple(nodes),
            bandwidth_probe(nodes, timeout_s),
            measure_rows=rows_probe(nodes, self._config.cpu, timeout_s),
        )
        try:
            return plan_layers(
                PlanRequest(
                    self._config,
                    machine,
                    facts,
                    parallel.pipeline_parallel_size,
                    parallel.tensor_parallel_size,
                    self._partition,
                    self._turn,
                )
            )
        except LayoutError as error:
            if self._external is None:
                raise
            inside = describe_group(self._external.bundles, nodes)
            raise LayoutError(f"{error} {inside}") from None

    def _refuse(self, world: World) -> None:
        model_config = self._vllm_config.model_config
        refuse_heads(model_config, world.layout)
        refuse_divided_layers(model_config.hf_text_config.to_dict(), world.layers)
        linear_kernel = self._config.cpu.linear_kernel
        checkpoint = CheckpointOnCpus.of_model(model_config, linear_kernel)
        refuse_ranks(checkpoint, world.layout, len(world.experts))
        if self._config.cpu.model_runner == "v2":
            refuse_first(RANKS_OF_V2_RUNNER, RunBy(model_config, world.layout, len(world.experts)))
        if world.is_stock:
            return
        refuse_first(ENGINES_OF_CPU_RANKS, self._vllm_config.parallel_config)
        refuse_first(SCHEDULING_OF_CPU_RANKS, self._scheduling(world))
        speculative, stages = self._vllm_config.speculative_config, world.layout.stages
        if speculative is not None:
            refuse_drafts(
                world.layout,
                has_states=bool(model_config.is_hybrid),
                has_draft_model=speculative.method == "draft_model",
            )
            refuse_first(
                DRAFTING_OF_CPU_RANKS, Drafting(self._vllm_config, self._config, world.layout)
            )
            if speculative.uses_draft_kv_cache() and "cpu" in stages[-1]:
                draft_model = speculative.draft_model_config
                drafter = CheckpointOnCpus.of_model(draft_model, linear_kernel)
                refuse_ranks(drafter, Layout((("cpu",),)))

    def _settle_dtype(self, world: World) -> None:
        """Say in which dtype the model is computed and why, or give a world of GPUs vLLM's own.

        Whether there are CPU ranks may be known only now.  Engines that run together keep what
        they have begun with, so that all have the same.
        """
        model = self._vllm_config.model_config
        stock = engine_args.stock_dtype(model)
        if stock is None:
            return
        has_cpus = world.has_cpu or bool(world.experts)
        if not has_cpus and self._spec.engines == 1:
            engine_args.take_stock_dtype(model)
            return
        own = str(stock).removeprefix("torch.")
        logger.info(
            "dtype: bfloat16; the quantised checkpoint names %s, for which CPU ranks have none of "
            "this project's kernels (--dtype %s keeps it)",
            own,
            own,
        )

    def _shared_settings(self, world: World) -> SharedSettings:
        scheduler = self._vllm_config.scheduler_config
        return shared_settings(
            self._vllm_config,
            world.layout,
            graph_tokens=mixed_groups.graph_tokens(
                self._spec.engine_args,
                self._config.gpu.in_mixed_groups,
                max_num_seqs=scheduler.max_num_seqs,
                max_num_batched_tokens=scheduler.max_num_batched_tokens,
            ),
            schedules_ahead=self._schedules_ahead(world),
        )

    def _forget_scheduler(self) -> None:
        """Go back to the scheduler that the user names, or to vLLM's own.

        A plan that was made before, with devices that somebody else has claimed first, has set what
        is right for its own world.
        """
        scheduler = self._vllm_config.scheduler_config
        own = (late_tokens.SCHEDULER, shared_batches.CLASS, *long_prompts.CLASSES)
        if scheduler.scheduler_cls in own:
            scheduler.scheduler_cls = self._spec.engine_args.scheduler_cls

    def _schedules_ahead(self, world: World) -> bool:
        """Whether a step is scheduled while the one before it is computed.

        Where one batch at a time is in the pipeline, its first stage would wait for the last one,
        and then for the scheduler and for its own preparation.
        """
        scheduling = self._scheduling(world)
        if world.is_stock or scheduling.is_asked is False or obstacle(scheduling) is not None:
            return False
        return scheduling.is_asked is True or self._batches_in_flight(world) == 1

    def _scheduling(self, world: World) -> Scheduling:
        asked = self._spec.engine_args.async_scheduling
        return Scheduling(self._vllm_config, self._config, world.layout, asked)

    def _batches_in_flight(self, world: World) -> int:
        asked = self._config.pipeline.batches_in_flight
        if asked != "auto":
            return asked
        if not world.is_stock and self._vllm_config.speculative_config is not None:
            # With more, vLLM's scheduler would take a batch's drafts for tokens before the batch
            # has told which token comes before them.
            return 1
        if world.has_cpu and not world.is_cpu_only and self._config.objective == "latency":
            return 1
        return int(self._vllm_config.max_concurrent_batches)

    def _lengthen_steps(self, world: World) -> None:
        """Use the room for steps of prompts alone that experts.prefill_step_tokens asks for."""
        asked = self._config.experts.prefill_step_tokens
        if asked is None:
            return
        scheduler = self._vllm_config.scheduler_config
        limit = scheduler.max_num_scheduled_tokens
        if conflict := long_prompts.steps_conflict(self._vllm_config):
            raise ConfigError(f"experts.prefill_step_tokens: {conflict}")
        if not world.experts:
            why = "no rank of this engine holds experts for others"
        elif not long_prompts.schedule_long_prompts(self._vllm_config):
            why = "this engine has another scheduler (--scheduler-cls, pipeline.batches_in_flight)"
        else:
            logger.info(
                "steps have up to %d tokens while no request decodes, and %d beside requests that "
                "do (experts.prefill_step_tokens)", asked, limit,
            )  # fmt: skip
            return
        logger.warning(
            "experts.prefill_step_tokens is not used, and steps have up to %d tokens: %s. Leave it "
            "out, so that memory for %d is not kept", limit, why, asked,
        )  # fmt: skip

    def _share_batches(self) -> None:
        """Divide the requests, where somebody wants more than one batch and not another scheduler.

        A draft model's tokens would be counted as requests.
        """
        config, vllm_config = self._config, self._vllm_config
        is_wanted = config.pipeline.batches_in_flight != "auto" or config.objective == "throughput"
        if (
            is_wanted
            and vllm_config.max_concurrent_batches > 1
            and vllm_config.scheduler_config.scheduler_cls is None
            and vllm_config.speculative_config is None
        ):
            vllm_config.scheduler_config.scheduler_cls = shared_batches.CLASS

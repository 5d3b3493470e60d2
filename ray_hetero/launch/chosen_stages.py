"""Stages of an engine of which nobody has said any: chosen before vLLM builds its configuration.

vLLM's sizes are in its configuration from the beginning, so they have to be known before the
executor exists.  What is there is told by this host, or by the Ray cluster that the engine will be
on.  Where nothing can be chosen, a warning says why, what is done instead and what to type; what
does not fit is an error here, before anything is loaded.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from placement.cluster.assignment import Node
from placement.errors import DoesNotFitError, TopologyError
from placement.model.reading import UnknownModelError
from ray_hetero.compat.engine import engine_environment
from ray_hetero.config import HeteroConfig
from ray_hetero.launch.found_machine import found_machine
from ray_hetero.log import logger
from ray_hetero.planning.context_fit import with_fitting_length
from ray_hetero.planning.engine_facts import (
    EngineFacts,
    facts_of_model,
    model_of,
    server_defaults,
)
from ray_hetero.planning.expert_ranks import with_expert_ranks
from ray_hetero.planning.layout_choice import Choice, choose_layout, config_of
from ray_hetero.planning.machine import Machine
from ray_hetero.planning.plan_request import PlanRequest
from ray_hetero.planning.planned_layers import LayerPlan
from ray_hetero.planning.seat_devices import UnknownDeviceError
from ray_hetero.preflight.node_software import lacking_kernels
from ray_hetero.preflight.refusals import WITH_EXPERT_RANKS
from ray_hetero.preflight.unsupported_checkpoints import CheckpointOnCpus

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from vllm.engine.arg_utils import EngineArgs

AUTO_LENGTH = -1
"""vLLM's number for `--max-model-len auto`."""
CHOSEN = "RAY_HETERO_CHOSEN_STAGES"
"""Variable by which the API processes of a server know what their parent has chosen: when they
build their configuration, the engines may have the devices already."""
INSTEAD = (
    "The engine takes one rank, which may not hold the model. Give the sizes, for example "
    "--pipeline-parallel-size 2, or a layout: "
    '--additional-config \'{"ray_hetero": {"layout": [["gpu"], ["cpu", "cpu"]]}}\''
)


def take_sizes(engine_args: EngineArgs, config: HeteroConfig) -> None:
    """Take vLLM's sizes from a layout that was written, where they were left at 1."""
    if config.layout != "auto" and _sizes(engine_args) == (1, 1):
        engine_args.pipeline_parallel_size = len(config.layout)
        engine_args.tensor_parallel_size = max(map(len, config.layout))


def choose_stages(
    engine_args: EngineArgs, config: HeteroConfig, group: PlacementGroup | None, engines: int
) -> HeteroConfig:
    """Choose a layout and vLLM's sizes, where the user has asked for neither.

    Args:
        engine_args: its sizes are set, and its longest length where that is to be what fits.
        config: the user's configuration.
        group: a placement group around this engine, whose bundles decide; None where there is none.
        engines: engines of a data-parallel server; each gets a layout that all have room for.

    Returns:
        The configuration with the layout written out; as it was where nothing was chosen.

    Raises:
        DoesNotFitError: the model fits in no layout.
        UnsupportedError: those that it fits in cannot compute it.
        StartupError: the cluster of RAY_ADDRESS does not answer.

    """
    is_asked = config.layout != "auto" or config.layers != "auto" or _sizes(engine_args) != (1, 1)
    if is_asked or os.environ.get("VLLM_PP_LAYER_PARTITION"):
        return config
    if multiprocessing.parent_process() is not None and CHOSEN in os.environ:
        return _take(engine_args, config, json.loads(os.environ[CHOSEN]))
    model = model_of(engine_args)
    checkpoint = CheckpointOnCpus.of_model(model, config.cpu.linear_kernel)
    try:
        with found_machine(config, group) as machine:
            facts = facts_of_model(engine_args, model, server_defaults(machine.nodes))
            facts, choice = _choose(config, machine, facts, checkpoint, engines, engine_args)
    except (UnknownModelError, UnknownDeviceError, TopologyError) as error:
        logger.warning("stages are not chosen: %s. %s", str(error).rstrip("."), INSTEAD)
        return config
    except DoesNotFitError as error:
        if not _are_held(machine.nodes):
            raise
        logger.warning(
            "stages are not chosen: what other engines leave is not enough: %s. %s",
            str(error).splitlines()[0].rstrip("."),
            INSTEAD,
        )
        return config
    logger.info("stages: %s", choice)
    chosen = config_of(choice, config)
    taken: dict[str, Any] = {"layout": chosen.layout, "experts": chosen.experts.ranks}
    if engine_args.max_model_len == AUTO_LENGTH:
        logger.info("--max-model-len auto: %d tokens", facts.max_model_len)
        taken["max_model_len"] = facts.max_model_len
    engine_environment.put(CHOSEN, json.dumps(taken))
    return _take(engine_args, config, taken)


def _choose(
    config: HeteroConfig,
    machine: Machine,
    facts: EngineFacts,
    checkpoint: CheckpointOnCpus,
    engines: int,
    engine_args: EngineArgs,
) -> tuple[EngineFacts, Choice]:
    """The choice, and the facts with the length for which it was made."""
    if all(node.is_driver for node in machine.nodes) and not config.cpu.install_kernels:
        checkpoint = replace(checkpoint, lacks_kernels=lacking_kernels())

    def choose(facts: EngineFacts) -> Choice:
        return choose_layout(
            PlanRequest(config, machine, facts, checkpoint=checkpoint), engines=engines
        )

    def plan(facts: EngineFacts) -> LayerPlan:
        found = choose(facts).chosen.plan
        assert found is not None
        return found

    if engine_args.max_model_len == AUTO_LENGTH:
        facts = with_fitting_length(facts, plan)
    return facts, choose(facts)


def _take(engine_args: EngineArgs, config: HeteroConfig, taken: dict[str, Any]) -> HeteroConfig:
    """Set vLLM's arguments to what was chosen; the configuration with it written out."""
    chosen = with_expert_ranks(config, taken["experts"])
    chosen = chosen.model_copy(update={"layout": taken["layout"]})
    take_sizes(engine_args, chosen)
    engine_args.max_model_len = taken.get("max_model_len", engine_args.max_model_len)
    return chosen


def _are_held(nodes: Sequence[Node]) -> bool:
    """Whether others hold devices, which may be free by the time that the engine plans."""
    return any(node.holders or node.held_gpus for node in nodes)


def settle_experts(engine_args: EngineArgs, config: HeteroConfig) -> HeteroConfig:
    """The configuration without expert ranks, where auto could choose some that are refused."""
    if config.experts.ranks != "auto":
        return config
    asked = [refusal for refusal in WITH_EXPERT_RANKS if refusal.is_asked(engine_args)]
    if not asked:
        return config
    logger.debug("no expert ranks (experts.ranks: auto): %s", asked[0].why)
    return with_expert_ranks(config, 0)


def _sizes(engine_args: EngineArgs) -> tuple[int, int]:
    return engine_args.pipeline_parallel_size, engine_args.tensor_parallel_size

"""Stages of an engine of which nobody has said any: chosen before vLLM builds its configuration.

vLLM's sizes are in its configuration from the beginning, so they have to be known before the
executor exists.  What is there is told by this host, or by the Ray cluster that this process is
connected to.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import ray

from placement.cluster import ray_cluster
from placement.errors import PlacementError
from ray_hetero.config import HeteroConfig
from ray_hetero.launch.early_layout import OVERRIDE
from ray_hetero.log import logger
from ray_hetero.planning.cluster_rows import rows_probe
from ray_hetero.planning.engine_facts import facts_of_model, server_defaults
from ray_hetero.planning.expert_ranks import with_expert_ranks
from ray_hetero.planning.layout_choice import choose_layout, config_of
from ray_hetero.planning.machine import Machine, this_host
from ray_hetero.planning.socket_bandwidth import bandwidth_probe
from ray_hetero.preflight.refusals import WITH_EXPERT_RANKS

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs


def take_sizes(engine_args: EngineArgs, config: HeteroConfig) -> None:
    """Take vLLM's sizes from a layout that was written, where they were left at 1."""
    if config.layout != "auto" and _sizes(engine_args) == (1, 1):
        engine_args.pipeline_parallel_size = len(config.layout)
        engine_args.tensor_parallel_size = max(map(len, config.layout))


def choose_stages(
    engine_args: EngineArgs, config: HeteroConfig, group: object, engines: int
) -> HeteroConfig:
    """Choose a layout and vLLM's sizes, where the user has asked for neither.

    Args:
        engine_args: its sizes are set.
        config: the user's configuration.
        group: a placement group around this engine, whose bundles decide; None where there is none.
        engines: engines of a data-parallel server; several share what there is.

    Returns:
        The configuration with the layout written out; as it was where nothing was chosen.

    """
    is_asked = config.layout != "auto" or config.layers != "auto" or _sizes(engine_args) != (1, 1)
    if is_asked or group is not None or engines > 1 or os.environ.get("VLLM_PP_LAYER_PARTITION"):
        return config
    machine = _machine(config)
    if machine is None:
        logger.info(
            "stages are not chosen: this process has not joined the cluster of RAY_ADDRESS; give "
            "--pipeline-parallel-size and --tensor-parallel-size for more than one rank"
        )
        return config
    defaults = server_defaults(machine.nodes)
    try:
        facts = facts_of_model(engine_args, defaults)
        choice = choose_layout(
            config, machine.nodes, facts,
            measure=machine.measure, measure_rows=machine.measure_rows,
        )  # fmt: skip
    except PlacementError as error:
        # The executor says so again once it has asked Ray, which may know of more.
        logger.warning("stages are not chosen: %s", str(error).splitlines()[0])
        return config
    if choice is None:
        return config
    logger.info("stages: %s", choice)
    chosen = config_of(choice, config)
    take_sizes(engine_args, chosen)
    return chosen


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


def _machine(config: HeteroConfig) -> Machine | None:
    """What an engine that starts now would find; None where Ray has to be asked first."""
    if ray.is_initialized():
        timeout_s = config.placement.timeout_s
        nodes = ray_cluster.discover(
            unit=config.cpu.unit, shares=config.cpu.ranks_per_socket, timeout_s=timeout_s
        )
        rows = rows_probe(nodes, config.cpu, timeout_s)
        return Machine(nodes, bandwidth_probe(nodes, timeout_s), measure_rows=rows)
    if os.environ.get("RAY_ADDRESS") or os.environ.get(OVERRIDE):
        return None
    return this_host(config.cpu)

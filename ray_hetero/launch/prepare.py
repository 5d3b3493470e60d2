"""Steps while vLLM builds its configuration: checks that need no cluster, the executor's name.

This runs in the process that the user started, before any other process of the engine.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import TYPE_CHECKING, Any

import ray
from vllm import envs

from placement.cluster import ray_cluster
from placement.cluster.layout import Layout
from ray_hetero.compat.engine import (
    api_server,
    engine_environment,
    engine_processes,
    input_processor,
    long_prompts,
)
from ray_hetero.compat.engine.engine_args import choose_dtype, found_spec
from ray_hetero.compat.models import model_registry
from ray_hetero.compat.worker import v2_runner
from ray_hetero.config import HeteroConfig, load_config
from ray_hetero.launch import early_ray
from ray_hetero.launch.chosen_stages import choose_stages, settle_experts, take_sizes
from ray_hetero.launch.data_parallel import engines_together, ray_for_all
from ray_hetero.launch.early_layout import (
    known_gpus,
    refuse_missing_sockets,
    resolve_auto_layout,
)
from ray_hetero.launch.found_machine import is_elsewhere
from ray_hetero.log import logger
from ray_hetero.observability import metrics
from ray_hetero.planning.activation_dtype import dtype_with_cpus
from ray_hetero.preflight.checks import check_ray_version
from ray_hetero.preflight.refusals import refuse_unsupported
from ray_hetero.runtime import exit_reason, heartbeat, ray_ahead
from ray_hetero.supported import TRIED_VLLM, installed_vllm, is_untried
from ray_hetero.world import EngineSpec

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def prepare(engine_args: EngineArgs) -> EngineSpec:
    """Check the request and make vLLM's arguments name the executor class.

    Raises:
        ConfigError, UnsupportedError: what the user asked for cannot work.

    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    from ray_hetero.executor.hetero_executor import HeteroExecutor

    _say_if_untried()

    exit_reason.catch()
    ray_ahead.wait_at_exit()
    engine_processes.end_engines_at_exit(exit_reason.engine_ended, early_ray.started_for)
    engine_processes.wait_for_engines_to_end()
    engine_processes.end_when_asked_during_start()
    check_ray_version()
    group = ray_cluster.current_group()
    engines = engines_together(engine_args)
    gpus = known_gpus() if group is None else None
    config = load_config(engine_args.additional_config)
    config = settle_experts(engine_args, config)
    _make_room_for_long_prompts(engine_args, config)
    # The stages are chosen by what CPU ranks would take.
    choose_dtype(engine_args, dtype_with_cpus, has_cpus=True)
    take_sizes(engine_args, config)
    config = choose_stages(engine_args, config, group, engines)
    config = resolve_auto_layout(
        config,
        engine_args.pipeline_parallel_size,
        engine_args.tensor_parallel_size,
        gpus if gpus is None else gpus // engines,
    )
    choose_dtype(engine_args, dtype_with_cpus, has_cpus=_has_cpus(config, gpus))
    is_stock = _is_surely_stock(config)
    refuse_unsupported(engine_args, config, is_stock=is_stock)
    is_alone = engines == 1 and not ray.is_initialized()
    if gpus == 0 and current_platform.is_cpu() and is_alone and exit_reason.is_command():
        refuse_missing_sockets(
            config, engine_args.pipeline_parallel_size, engine_args.tensor_parallel_size
        )
    spec = EngineSpec(
        _as_written(engine_args),
        config,
        ray_for_all(engine_args),
        placement_group=group,
        engines=engines,
        in_notebook="ipykernel" in sys.modules,
        metrics_path=metrics.show_engine(),
        heartbeat_path=heartbeat.new_path() if isinstance(engine_args, AsyncEngineArgs) else "",
    )
    engine_args.distributed_executor_backend = HeteroExecutor
    input_processor.refuse_prompts_that_end_ranks()
    if isinstance(engine_args, AsyncEngineArgs):
        api_server.turn_away_while_unhealthy(_late)
    if spec.ray_address is not None or is_elsewhere():
        # A forked engine would take this process's connection to Ray for its own.
        engine_environment.put(START_METHOD, os.environ.get(START_METHOD, "spawn"))
    _choose_runner(engine_args, config, is_stock=is_stock)
    model_registry.inspect_here()
    model_registry.load_models_without_torchvision()
    return spec


def _say_if_untried() -> None:
    """Warn of a supported vLLM whose answers on GPUs have not been compared."""
    if is_untried(release := installed_vllm()):
        logger.warning(
            "vLLM %s: answers on GPUs have not been compared with it yet. Compare yours, "
            "or type: pip install 'vllm==%s.*'",
            release, TRIED_VLLM,
        )  # fmt: skip


def _late(vllm_config: Any) -> str | None:
    """Description of an engine of this backend that does not go on; None for any other."""
    spec = found_spec(vllm_config)
    if spec is None:
        return None
    serving = spec.config.serving
    step_limit_s = serving.step_timeout_s or envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
    return heartbeat.late(spec.heartbeat_path, serving.heartbeat_timeout_s, step_limit_s)


def _make_room_for_long_prompts(engine_args: EngineArgs, config: HeteroConfig) -> None:
    """Apply experts.prefill_step_tokens, before anything is planned by the tokens of a step."""
    names = ("max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_seqs")
    config.experts.check_limits(**{name: getattr(engine_args, name) for name in names})
    if (tokens := config.experts.prefill_step_tokens) is not None:
        long_prompts.make_room(engine_args, tokens)


def _as_written(engine_args: EngineArgs) -> EngineArgs:
    """A copy; vLLM adds what it finds out to the mapping of the speculative configuration."""
    written = copy.copy(engine_args)
    if isinstance(engine_args.speculative_config, dict):
        written.speculative_config = dict(engine_args.speculative_config)
    return written


def _choose_runner(engine_args: EngineArgs, config: HeteroConfig, *, is_stock: bool) -> None:
    """Tell vLLM the model runner and the scheduling that CPU ranks and unequal stages have.

    Every process of the engine must agree, and vLLM reads both while it builds the driver's
    configuration.  Without these the choice is vLLM's own.
    """
    if is_stock:
        return
    is_v2 = config.cpu.model_runner == "v2"
    if is_v2:
        backend = engine_args.distributed_executor_backend
        v2_runner.run_without_triton(
            lambda given: given.parallel_config.distributed_executor_backend is backend
        )
    engine_environment.put(RUNNER, str(int(is_v2)))
    engine_args.async_scheduling = False


def _has_cpus(config: HeteroConfig, gpus: int | None) -> bool | None:
    """Whether a rank or an expert rank will be a CPU socket; None where that is not known yet."""
    if config.layout == "auto":
        # Known GPUs that sufficed would have been written out.
        return None if gpus is None else True
    if any("cpu" in stage for stage in config.layout):
        return True
    ranks = config.experts.ranks
    return None if ranks == "auto" else ranks > 0


def _is_surely_stock(config: HeteroConfig) -> bool:
    """Whether the ranks are known to be GPUs in stages of one size."""
    return config.layout != "auto" and Layout(tuple(map(tuple, config.layout))).is_stock

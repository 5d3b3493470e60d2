"""What happens while vLLM builds its configuration: check what needs no cluster, name the executor.

This runs in the process that the user started, before any other process of the engine.
"""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING

from ray_hetero import last_words
from ray_hetero.config import HeteroConfig, load_config
from ray_hetero.local_ray import check_ray_version, connected_address
from ray_hetero.refusals import refuse_unsupported
from ray_hetero.world import Launch

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs


def prepare(engine_args: EngineArgs) -> Launch:
    """Check the request and make vLLM's arguments name the executor class.

    Raises:
        ConfigError, UnsupportedError: what the user asked for cannot work.

    """
    from ray_hetero.executor import HeteroExecutor

    last_words.catch()
    check_ray_version()
    config = load_config(engine_args.additional_config)
    refuse_unsupported(engine_args, config)
    launch = Launch(copy.copy(engine_args), config, connected_address())
    engine_args.distributed_executor_backend = HeteroExecutor
    if _may_have_cpu_ranks(config):
        # CPU ranks have the V1 model runner and no asynchronous scheduling; every process of
        # the engine must agree, and vLLM reads both while it builds the driver's configuration.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        engine_args.async_scheduling = False
    return launch


def _may_have_cpu_ranks(config: HeteroConfig) -> bool:
    return config.layout == "auto" or any("cpu" in stage for stage in config.layout)

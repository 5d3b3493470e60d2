"""The Ray of an engine, started a moment before the engine's process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import ray
from vllm import envs

from ray_hetero.compat.engine import engine_environment
from ray_hetero.compat.engine.engine_args import spec_of
from ray_hetero.runtime import ray_ahead
from ray_hetero.runtime.ray_address import MODE as AUTH_MODE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SOCKETS = "VLLM_RPC_BASE_PATH"
"""Variable that names the folder of the sockets between vLLM's processes on one host."""


@contextmanager
def started_for(vllm_config: VllmConfig) -> Iterator[None]:
    """Start an engine's Ray while the block starts the engine's process.

    Ray takes seconds to start, most of which it waits, and so does importing vLLM, which is the
    first that the process does.  An engine that finds a Ray, or does not import, starts none ahead.
    """
    if not _is_wanted(vllm_config):
        yield
        return
    # Ray asks for a token where nothing says otherwise, but only the process that starts it knows.
    engine_environment.put(AUTH_MODE, os.environ.get(AUTH_MODE, "token"))
    started = ray_ahead.RayAhead()
    engine_environment.put(ray_ahead.VARIABLE, started.address)
    if SOCKETS not in os.environ:
        # Those of vLLM's queues go with the folder, and nobody else can connect to them.
        engine_environment.put(SOCKETS, started.folder)
    with ExitStack() as failed:
        failed.callback(started.end)
        yield
        failed.pop_all()


def _is_wanted(vllm_config: VllmConfig) -> bool:
    backend = vllm_config.parallel_config.distributed_executor_backend
    if not getattr(backend, "is_ray_hetero", False):
        return False
    spec = spec_of(vllm_config)
    finds_one = (
        spec.ray_address is not None
        or spec.placement_group is not None
        or bool(os.environ.get("RAY_ADDRESS"))
        or ray.is_initialized()
        # Several engines have one in common, which is their parent's.
        or spec.engines > 1
        or multiprocessing.parent_process() is not None
    )
    # A forked process, or this one, has vLLM already.
    imports = envs.VLLM_ENABLE_V1_MULTIPROCESSING and envs.VLLM_WORKER_MULTIPROC_METHOD == "spawn"
    return imports and not finds_one and ray_ahead.VARIABLE not in os.environ

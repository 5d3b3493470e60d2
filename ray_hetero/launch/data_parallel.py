"""The engines of a data-parallel server: how many share one Ray, and who starts it."""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING

from ray_hetero.runtime.ray_connection import connected_address, start_shared

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs


def engines_together(engine_args: EngineArgs) -> int:
    """Engines that look for devices in the same Ray: all of a cluster, else those of this host."""
    size = int(engine_args.data_parallel_size)
    if connected_address() or os.environ.get("RAY_ADDRESS"):
        return size
    if engine_args.data_parallel_size_local is not None:
        return int(engine_args.data_parallel_size_local)
    # A server that is told which one it is runs that one only.
    return 1 if engine_args.data_parallel_rank is not None else size


def ray_for_all(engine_args: EngineArgs) -> str | None:
    """Address of the Ray that this process is connected to, or has started for several engines.

    None where each engine finds its own.
    """
    if address := connected_address():
        return address
    # A server of several API processes has come here before, in their parent.
    is_child = multiprocessing.parent_process() is not None
    if engines_together(engine_args) < 2 or is_child or os.environ.get("RAY_ADDRESS"):
        return None
    return start_shared()

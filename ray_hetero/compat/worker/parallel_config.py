"""vLLM's ParallelConfig: what engines of a data-parallel server differ in, and numbers of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray_hetero.compat.patching import original

if TYPE_CHECKING:
    from vllm.config import ParallelConfig
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

DATA_PARALLEL_FIELDS = (
    "data_parallel_size",
    "data_parallel_size_local",
    "data_parallel_rank",
    "data_parallel_rank_local",
    "data_parallel_index",
    "data_parallel_master_ip",
    "_coord_store_port",
)
"""Fields that the engines' launcher has set on the driver's configuration only."""


def read_data_parallel(config: ParallelConfig) -> tuple[tuple[str, Any], ...]:
    """Read what a driver's engine was told of the others; names and values.

    Uses: `ParallelConfig._coord_store_port`.
    """
    return tuple((name, original(config, name)) for name in DATA_PARALLEL_FIELDS)


def impose_data_parallel(config: ParallelConfig, values: tuple[tuple[str, Any], ...]) -> None:
    """Tell a rank's configuration the same.

    Uses: `ParallelConfig._coord_store_port`.
    """
    for name, value in values:
        original(config, name)
        setattr(config, name, value)


def set_parallel_sizes(executor: MultiprocExecutor) -> None:
    """Set an executor's numbers of ranks from its configuration.

    Uses: `MultiprocExecutor._get_parallel_sizes`.
    """
    original(executor, "_get_parallel_sizes")()

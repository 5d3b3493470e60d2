"""Each rank's own VllmConfig: built on its platform, with what all ranks share imposed on it."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import reduce
from typing import TYPE_CHECKING

from placement.cluster.layout import Layout
from placement.units import GIB
from ray_hetero.compat.models import model_registry
from ray_hetero.compat.worker import kv_cache, parallel_config, v2_runner
from ray_hetero.errors import AgreementError
from ray_hetero.planning.engine_facts import CPU_BLOCK_SIZE
from ray_hetero.runtime.process_state import Place
from ray_hetero.world import RankSpec, SharedSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SHARED_FIELDS = (
    "instance_id",
    "model_config.model",
    "model_config.dtype",
    "model_config.max_model_len",
    "model_config.quantization",
    "model_config.seed",
    "cache_config.block_size",
    "cache_config.cache_dtype",
    "cache_config.enable_prefix_caching",
    "scheduler_config.max_num_batched_tokens",
    "scheduler_config.max_num_seqs",
    "scheduler_config.async_scheduling",
    "scheduler_config.enable_chunked_prefill",
    "parallel_config.world_size",
    "parallel_config.pipeline_parallel_size",
    "parallel_config.data_parallel_size",
    "num_speculative_tokens",
    "use_v2_model_runner",
)
"""Fields that must be equal on all ranks, or they compute different things or wait for ever."""
SHARED_ARGUMENTS = (
    "dtype", "max_model_len", "block_size", "seed", "max_num_batched_tokens", "max_num_seqs",
    "async_scheduling", "enable_prefix_caching", "enable_chunked_prefill",
)  # fmt: skip
"""vLLM's engine arguments that every rank gets from `SharedSettings`."""


@dataclass(frozen=True)
class Fingerprint:
    """A rank's answer to what it would run with: its shared fields and its GPU."""

    rank: int
    fields: Mapping[str, str]
    physical_gpus: tuple[int, ...] = ()
    place: Place = dataclass_field(default_factory=Place.here)
    """Place of the process that answers."""


def shared_settings(
    driver: VllmConfig,
    layout: Layout,
    *,
    graph_tokens: tuple[int, ...] = (),
    schedules_ahead: bool = False,
) -> SharedSettings:
    """Read what all ranks must share off the driver's configuration.

    The driver's own configuration is changed too where its platform chose otherwise: the number of
    ranks where stages differ in size, synchronous scheduling, and with CPU ranks the block size
    (unless the user set it).
    """
    cache = driver.cache_config
    driver.parallel_config.world_size = layout.world_size
    if not layout.is_stock:
        driver.scheduler_config.async_scheduling = False
    if not cache.user_specified_block_size:
        cache.block_size = _block_size(driver, layout)
    return SharedSettings(
        instance_id=driver.instance_id,
        dtype=str(driver.model_config.dtype).removeprefix("torch."),
        max_model_len=driver.model_config.max_model_len,
        block_size=cache.block_size,
        seed=driver.model_config.seed,
        max_num_batched_tokens=driver.scheduler_config.max_num_batched_tokens,
        max_num_seqs=driver.scheduler_config.max_num_seqs,
        async_scheduling=driver.scheduler_config.async_scheduling,
        schedules_ahead=schedules_ahead,
        enable_prefix_caching=cache.enable_prefix_caching,
        enable_chunked_prefill=driver.scheduler_config.enable_chunked_prefill,
        graph_tokens=graph_tokens,
        data_parallel=parallel_config.read_data_parallel(driver.parallel_config),
        kv_engine_id=driver.kv_transfer_config and driver.kv_transfer_config.engine_id,
    )


def _block_size(driver: VllmConfig, layout: Layout) -> int:
    from vllm.platforms import current_platform

    # On a CPU driver the platform chooses (16 for MLA without AMX, for example).
    if current_platform.is_cpu():
        return kv_cache.block_size_on_cpu(driver, CPU_BLOCK_SIZE)
    size: int = driver.cache_config.block_size
    return CPU_BLOCK_SIZE if layout.count("cpu") else size


def build_rank_config(rank: RankSpec) -> VllmConfig:
    """Build this rank's configuration on this process's platform.

    Raises:
        Whatever vLLM raises for options that this platform does not take.

    """
    from vllm.platforms import current_platform

    from ray_hetero.worker import mixed_groups

    # The cache of what is known of a model is one of this node, on others it may be empty.
    model_registry.inspect_here()
    model_registry.load_models_without_torchvision()
    args = copy.copy(rank.engine.engine_args)
    shared, config = rank.shared, rank.engine.config
    # vLLM's GPU worker checks local ranks against nnodes for every other backend name.
    args.distributed_executor_backend = "ray"
    # vLLM knows one size for all stages; a rank is told that of its own.
    args.pipeline_parallel_size = len(rank.world.layout.stages)
    args.tensor_parallel_size = rank.world.layout.sizes[rank.seat.stage]
    for name in SHARED_ARGUMENTS:
        setattr(args, name, getattr(shared, name))
    # Without it a Gloo exchange with a peer that hangs waits for half an hour.
    args.distributed_timeout_seconds = math.ceil(config.exchange.timeout_s)
    args.cpu_distributed_timeout_seconds = math.ceil(config.exchange.timeout_s)
    if config.cpu.model_runner == "v2":
        v2_runner.run_without_triton(lambda _: True)
    if current_platform.is_cpu():
        # Without an explicit size CPUWorker insists on a share of the node's whole memory.
        # The real size is set after loading, when what is free is known.
        asked = config.cpu.kv_cache_gib
        args.kv_cache_memory_bytes = GIB if asked == "auto" else int(asked * GIB)
    elif config.gpu.memory_utilization is not None:
        args.gpu_memory_utilization = config.gpu.memory_utilization
    is_in_mixed = current_platform.is_cuda() and rank.world.layout.is_mixed(rank.seat.stage)
    if is_in_mixed:
        mixed_groups.before_configuring(args, config.gpu.in_mixed_groups, shared.graph_tokens)
    vllm_config = args.create_engine_config()
    if is_in_mixed:
        mixed_groups.split_at_collectives(vllm_config)
    _impose(vllm_config, shared)
    vllm_config.parallel_config.world_size = rank.world.layout.world_size
    return vllm_config


def _impose(vllm_config: VllmConfig, shared: SharedSettings) -> None:
    vllm_config.instance_id = shared.instance_id
    # The CPU platform rounds some of these by itself.
    vllm_config.scheduler_config.max_num_batched_tokens = shared.max_num_batched_tokens
    vllm_config.scheduler_config.enable_chunked_prefill = shared.enable_chunked_prefill
    vllm_config.cache_config.enable_prefix_caching = shared.enable_prefix_caching
    parallel_config.impose_data_parallel(vllm_config.parallel_config, shared.data_parallel)
    if vllm_config.kv_transfer_config is not None:
        # vLLM makes one up for each configuration that names none.
        vllm_config.kv_transfer_config.engine_id = shared.kv_engine_id


def fingerprint(rank: int, vllm_config: VllmConfig, physical_gpus: Sequence[int]) -> Fingerprint:
    """Read the shared fields of a rank's configuration."""
    fields = {path: str(reduce(getattr, path.split("."), vllm_config)) for path in SHARED_FIELDS}
    return Fingerprint(rank, fields, tuple(physical_gpus))


def check_agreement(fingerprints: Sequence[Fingerprint]) -> None:
    """Compare all ranks' shared fields.

    Raises:
        AgreementError: names the field, the ranks and their values.

    """
    problems = []
    # An expert rank runs no model, and has no fields.
    running = [answer for answer in fingerprints if answer.fields]
    for field in SHARED_FIELDS:
        by_value: dict[str, list[int]] = {}
        for answer in running:
            by_value.setdefault(answer.fields[field], []).append(answer.rank)
        if len(by_value) > 1:
            values = ", ".join(f"{value} on ranks {ranks}" for value, ranks in by_value.items())
            problems.append(f"{field}: {values}")
    if problems:
        raise AgreementError("ranks disagree: " + "; ".join(problems))

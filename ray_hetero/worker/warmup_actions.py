"""The rank's side of the warm-up schedule: carry out one step and acknowledge it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms import current_platform
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import set_random_seed

from ray_hetero.compat.worker import warmup
from ray_hetero.compat.worker.received_tensors import unread_names
from ray_hetero.errors import UnsupportedError
from ray_hetero.log import logger
from ray_hetero.offload.prefill.stage_output import StageOutput
from ray_hetero.planning.world_plan import KV_ROUNDS, KV_SHARE_OF_FREE
from ray_hetero.runtime.core_binding import keep_to, lead_from_first_core
from ray_hetero.worker import placement_proof
from ray_hetero.worker.warmup_schedule import Action, Step

PLANNED_SHARE_OF_FREE = 0.9
"""Most of the free memory that a planned KV cache takes: the plan may have been wrong."""


@dataclass(frozen=True)
class Acknowledged:
    """A rank's answer to one step."""

    rank: int
    step: int
    value: Any = None


@dataclass(frozen=True)
class RankContext:
    """Context of a rank's warm-up steps."""

    rank: int
    kind: str
    kv_cache_bytes: int | None
    """Size the user asked for; None sizes it from what is free."""
    ranks_on_memory: int
    """CPU ranks that draw on the same free memory."""
    kv_tokens: int | None = None
    """Tokens that the plan gives the KV cache; None where there is no plan of it."""
    numa_nodes: tuple[int, ...] = ()
    """NUMA nodes where a CPU rank's memory belongs; none for a GPU rank."""
    threads: tuple[int, ...] = ()
    """Logical CPUs that a CPU rank computes on."""
    serving_cpus: tuple[int, ...] = ()
    """Logical CPUs that a GPU rank keeps to from now on; none where it may use any."""
    has_run_ahead: bool = False
    """Whether its largest forward pass is made before the schedule begins."""
    max_remote_memory_fraction: float | None = None
    """Largest share of its memory on other nodes."""
    output: StageOutput | None = None
    """Memory of a GPU in which a CPU rank's stage leaves results for the next one."""


def perform(worker: Any, context: RankContext, step: Step) -> Acknowledged:
    """Carry out one step on this rank's vLLM worker."""
    with torch.inference_mode(), set_current_vllm_config(worker.vllm_config):
        return Acknowledged(context.rank, step.number, _ACTIONS[step.action](worker, context, step))


def run_ahead(worker: Any, serving_cpus: Collection[int], own_cpus: Collection[int]) -> None:
    """Run the largest forward pass of a rank's vLLM worker while other ranks get ready.

    Args:
        worker: vLLM's.
        serving_cpus: what a GPU rank keeps to meanwhile: CPU ranks measure their steps on the
            others.
        own_cpus: what it may use again then, until the engine serves.

    """
    keep_to(serving_cpus)
    try:
        with torch.inference_mode(), set_current_vllm_config(worker.vllm_config):
            warmup.run_ahead(worker)
    finally:
        if serving_cpus:
            keep_to(own_cpus)


def check_what_is_read(worker: Any, context: RankContext) -> None:
    """Refuse a model that leaves something unread of what crosses its stage boundary.

    Raises:
        UnsupportedError: names the tensors.

    """
    if getattr(get_pp_group(), "boundary", None) is None:
        return
    unread = unread_names(worker.model_runner)
    if unread:
        model = type(worker.model_runner.get_model()).__name__
        raise UnsupportedError(
            f"{model} does not read {', '.join(unread)} behind a stage boundary: the stage before "
            f"sends that to {context.kind} rank {context.rank}, and tokens would be wrong without "
            "it. Write a layout of one stage."
        )


def _measure_memory(worker: Any, context: RankContext, step: Step) -> int:
    check_what_is_read(worker, context)
    if current_platform.is_cuda():
        return int(worker.determine_available_memory())
    warmup.measure_on_cpu(worker)
    return _kv_budget(worker, context, step)


def _forward(worker: Any, context: RankContext, step: Step) -> None:
    check_what_is_read(worker, context)
    if not (context.has_run_ahead and step.tokens == worker.model_runner.max_num_tokens):
        warmup.run_forward(worker.model_runner, step.tokens)


def _kv_budget(worker: Any, context: RankContext, step: Step) -> int:
    """Bytes for the KV cache: what was asked, else room for all sequences, if that much is free."""
    if context.kv_cache_bytes is not None:
        return context.kv_cache_bytes
    model, scheduler = worker.vllm_config.model_config, worker.vllm_config.scheduler_config
    specs: list[Any] = list(worker.get_kv_cache_spec().values())
    # vLLM keeps one block for itself; without it the last sequence would wait for a whole round.
    needed: int = sum(
        spec.page_size_bytes * (cdiv(model.max_model_len, spec.block_size) * sequences + 1)
        for spec in specs
        for sequences in [scheduler.max_num_seqs * KV_ROUNDS]
    )
    available = psutil.virtual_memory().available
    if context.kv_tokens is None:
        return min(needed, int(available * KV_SHARE_OF_FREE / context.ranks_on_memory))
    # The plan knows what every rank of the host takes.
    planned: int = sum(
        spec.page_size_bytes * (cdiv(context.kv_tokens, spec.block_size) + 1) for spec in specs
    )
    return min(needed, planned, int(available * PLANNED_SHARE_OF_FREE))


def _sample(worker: Any, context: RankContext, step: Step) -> None:
    warmup.run_and_sample(worker.model_runner, step.tokens)


def _capture(worker: Any, context: RankContext, step: Step) -> None:
    if not current_platform.is_cuda():
        warmup.run_beside_capture(worker.model_runner, step.tokens)
        return
    stream, current = _capture_stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        warmup.capture_graph(worker.model_runner, step.tokens)
    current.wait_stream(stream)


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    """One for all graphs: they share memory, which is reused on the stream that has freed it."""
    return torch.cuda.Stream()


def _stock_warm_up(worker: Any, context: RankContext, step: Step) -> tuple[float, float]:
    times = worker.compile_or_warm_up_model()
    return times.language_model, times.encoder


def _boundary(worker: Any, context: RankContext, step: Step) -> None:
    boundary = getattr(get_pp_group(), "boundary", None)
    if boundary is None:
        return
    runner = worker.model_runner
    template = runner.model.make_empty_intermediate_tensors(
        batch_size=1, dtype=runner.model_config.dtype, device=runner.device
    )
    timeout_s = worker.parallel_config.cpu_distributed_timeout_seconds
    boundary.agree(
        template.tensors, runner.max_num_tokens, timeout_s, context.numa_nodes, context.output
    )


def _finish(worker: Any, context: RankContext, step: Step) -> None:
    lead_from_first_core(context.threads)
    keep_to(context.serving_cpus)
    _prove_placement(worker, context)
    set_random_seed(worker.model_config.seed, worker.parallel_config.data_parallel_index)
    # A model, its compiled code and libraries of kernels stay: looking through their objects takes
    # the collector tens of milliseconds of a step.  As at the end of vLLM's own warm-up, which not
    # all ranks run.
    freeze_gc_heap()


def _prove_placement(worker: Any, context: RankContext) -> None:
    if not context.numa_nodes:
        return
    runner = worker.model_runner
    tensors = [*runner.model.parameters(), *placement_proof.flat(runner.kv_caches)]
    proof = placement_proof.prove(tensors, context.numa_nodes, context.threads)
    logger.info("%s rank %d: %s", context.kind, context.rank, proof)
    placement_proof.check(proof, context.max_remote_memory_fraction)


_ACTIONS: dict[Action, Callable[[Any, RankContext, Step], Any]] = {
    Action.MEASURE_MEMORY: _measure_memory,
    Action.FORWARD: _forward,
    Action.KV_BUDGET: _kv_budget,
    Action.SAMPLE: _sample,
    Action.CAPTURE: _capture,
    Action.STOCK_WARM_UP: _stock_warm_up,
    Action.BOUNDARY: _boundary,
    Action.FINISH: _finish,
    Action.IDLE: lambda worker, context, step: None,
}

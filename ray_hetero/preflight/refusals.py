"""What this backend cannot do, refused in one line before anything starts.

Most were seen to fail, or to be ignored, when they were tried, the others follow from vLLM's code;
docs/compatibility.md says which.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from placement.cluster.layout import Layout, sizes_to_type
from ray_hetero.config import HeteroConfig
from ray_hetero.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig
    from vllm.engine.arg_utils import EngineArgs


@dataclass(frozen=True)
class Refusal:
    """An option that does not work."""

    option: str
    is_asked: Callable[[EngineArgs], object]
    why: str
    instead: str = "Leave it out."

    def __str__(self) -> str:
        """The line for the user."""
        return f"{self.option} does not work with ray_hetero: {self.why}. {self.instead}"


ALWAYS: Sequence[Refusal] = (
    Refusal("--nnodes", lambda args: args.nnodes > 1, "Ray places the ranks; leave it at 1"),
    Refusal(
        "--device-ids",
        lambda args: args.device_ids,
        "Ray chooses the GPUs",
        "Leave it out, or set CUDA_VISIBLE_DEVICES where Ray is started.",
    ),
    Refusal(
        "--numa-bind",
        lambda args: args.numa_bind,
        "every rank is bound to its own socket already",
    ),
    Refusal(
        "--kv-transfer-config",
        lambda args: args.kv_transfer_config,
        "KV blocks live on two kinds",
    ),
    Refusal(
        "--prefill-context-parallel-size",
        lambda args: args.prefill_context_parallel_size > 1,
        "a layout has pipeline stages and tensor-parallel ranks only",
    ),
)
"""Refused in every world."""

ONLY_V2 = "it needs vLLM's V2 model runner, CPU ranks have V1"
WITH_CPU_RANKS: Sequence[Refusal] = (
    Refusal(
        "--speculative-config",
        lambda args: args.speculative_config or args.spec_method or args.spec_model,
        "drafts run on one kind only",
    ),
    Refusal("--enable-sleep-mode", lambda args: args.enable_sleep_mode, "CPU ranks cannot sleep"),
    Refusal(
        "--decode-context-parallel-size",
        lambda args: args.decode_context_parallel_size > 1,
        "attention on CPUs does not give the sums that it combines",
    ),
    Refusal(
        "--async-scheduling",
        lambda args: args.async_scheduling,
        "CPU ranks compute one step at a time",
    ),
    Refusal(
        "VLLM_USE_V2_MODEL_RUNNER=1",
        lambda args: os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1",
        "CPU ranks have the V1 model runner",
        "Unset it.",
    ),
    Refusal("--watermark-config", lambda args: args.watermark_config, ONLY_V2),
    Refusal("--enable-trace-replay", lambda args: args.enable_trace_replay, ONLY_V2),
    Refusal("--return-sampling-mask", lambda args: args.return_sampling_mask, ONLY_V2),
    Refusal(
        "--enable-return-routed-experts", lambda args: args.enable_return_routed_experts, ONLY_V2
    ),
    Refusal(
        "--enable-batch-sharded-sampling", lambda args: args.enable_batch_sharded_sampling, ONLY_V2
    ),
    Refusal(
        "--enable-expert-parallel",
        lambda args: (
            args.enable_expert_parallel and args.tensor_parallel_size * args.data_parallel_size > 1
        ),
        "vLLM's experts on CPUs crash where a rank holds some of them only",
        "Leave it out: tensor parallelism splits every expert.",
    ),
    Refusal("--enable-eplb", lambda args: args.enable_eplb, "it moves experts between GPUs only"),
    Refusal("--enable-dbo", lambda args: args.enable_dbo, "it overlaps kernels of GPUs only"),
)
"""Refused where the world may have CPU ranks, or has stages of several sizes."""


def refuse_unsupported(engine_args: EngineArgs, config: HeteroConfig, *, is_stock: bool) -> None:
    """Raise for the first option that cannot work.

    Args:
        engine_args: what vLLM was asked for.
        config: what this backend was asked for.
        is_stock: whether the ranks are known to be GPUs in stages of one size.

    Raises:
        UnsupportedError: the option does not work with CPU ranks, with stages of several sizes, or
            with this backend at all.
        ConfigError: the sizes asked for contradict each other.

    """
    _check_model_path(engine_args.model)
    stages = engine_args.pipeline_parallel_size
    ranks = engine_args.tensor_parallel_size
    _check_layout(config, stages, ranks)
    _check_layers(config, stages)
    _check_restart(engine_args, config)
    for refusal in (*ALWAYS, *(() if is_stock else WITH_CPU_RANKS)):
        if refusal.is_asked(engine_args):
            raise UnsupportedError(str(refusal))


def _check_restart(engine_args: EngineArgs, config: HeteroConfig) -> None:
    if not config.restart:
        return
    if engine_args.data_parallel_size > 1:
        raise UnsupportedError(
            f"restart: {config.restart} does not work with --data-parallel-size "
            f"{engine_args.data_parallel_size}: the engines step together. Leave one of them out."
        )
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        raise UnsupportedError(
            f"restart: {config.restart} needs vLLM's engine in a process of its own, but "
            "VLLM_ENABLE_V1_MULTIPROCESSING is 0. Unset it, or leave restart out."
        )


def _check_model_path(model: str) -> None:
    """A name on a hub has at most one slash and does not start like a path."""
    is_path = model.startswith(("/", "./", "../", "~")) or model.count("/") > 1
    if is_path and "://" not in model and not Path(model).expanduser().exists():
        raise ConfigError(
            f"model: there is no {model!r} on this host. Give an existing directory, the name of "
            "a model on the hub (owner/name), or make one: ray-hetero demo-model DIR"
        )


def _check_layout(config: HeteroConfig, stages: int, ranks: int) -> None:
    if config.layout == "auto":
        return
    given = [len(stage) for stage in config.layout]
    if (len(given), max(given)) != (stages, ranks):
        of = " and ".join(map(str, sorted(set(given))))
        raise ConfigError(
            f"layout: {len(given)} stages of {of} ranks, but vLLM was asked for "
            f"--pipeline-parallel-size {stages} --tensor-parallel-size {ranks}. "
            f"{sizes_to_type(given)}"
        )


def _check_layers(config: HeteroConfig, stages: int) -> None:
    if config.layers != "auto" and len(config.layers) != stages:
        raise ConfigError(
            f"layers: {len(config.layers)} numbers {config.layers} for {stages} pipeline stages; "
            "give one number a stage"
        )
    partition = os.environ.get("VLLM_PP_LAYER_PARTITION")
    if config.layers != "auto" and partition:
        given = ",".join(map(str, config.layers))
        if partition.replace(" ", "") != given:
            raise ConfigError(
                f"layers {given} contradicts VLLM_PP_LAYER_PARTITION={partition}; keep one of them"
            )


def refuse_heads(model: ModelConfig, layout: Layout) -> None:
    """Refuse stages whose number of ranks does not divide the heads of a model.

    Raises:
        UnsupportedError: names the stage, the arithmetic and the numbers that do.

    """
    heads: int = model.model_arch_config.total_num_attention_heads
    kv_heads: int = model.get_total_num_kv_heads()
    if not heads or not kv_heads:
        return

    def divides(size: int) -> bool:
        # With more ranks than KV heads, several keep the same one.
        return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    for stage, size in enumerate(layout.sizes):
        if not divides(size):
            fitting = ", ".join(str(n) for n in range(1, heads + 1) if divides(n))
            raise UnsupportedError(
                f"stage {stage} of layout {layout} has {size} tensor-parallel ranks, but the model "
                f"has {heads} attention heads and {kv_heads} KV heads: {heads} / {size} = "
                f"{heads / size:g}, {kv_heads} / {size} = {kv_heads / size:g}. Numbers of ranks in "
                f"a stage that fit: {fitting}."
            )


def refuse_shared_experts(parallel: ParallelConfig) -> None:
    """Refuse engines that would share the experts of a model, where there are CPU ranks.

    Engines of a model without experts are independent, and vLLM has told each by now that it is
    the only one.

    Raises:
        UnsupportedError: this engine is one of several that exchange tokens.

    """
    if parallel.data_parallel_size > 1:
        raise UnsupportedError(
            f"--data-parallel-size {parallel.data_parallel_size} does not work with ray_hetero for "
            "a model with experts: its engines exchange tokens, which vLLM cannot between CPU "
            "ranks. Leave it out, or start several servers."
        )

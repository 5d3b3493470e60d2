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

from ray_hetero.config import HeteroConfig
from ray_hetero.errors import ConfigError, UnsupportedError
from ray_hetero.preflight.unsupported_drafters import METHODS, why_not

if TYPE_CHECKING:
    from vllm.config import ParallelConfig
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


def _drafting_method(args: EngineArgs) -> str | None:
    """As the user names it; vLLM finds out others from the draft model."""
    given = args.speculative_config
    method = given.get("method") if isinstance(given, dict) else getattr(given, "method", None)
    return args.spec_method or method


ONLY_V2 = "it needs vLLM's V2 model runner, CPU ranks have V1"
WITH_CPU_RANKS: Sequence[Refusal] = (
    Refusal(
        "--speculative-config",
        lambda args: why_not(_drafting_method(args)),
        f"only drafts of the methods {', '.join(METHODS)} were made and verified on CPU ranks",
        "Leave it out, or name one of them.",
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
"""Refused where the world may have CPU ranks."""


def refuse_unsupported(engine_args: EngineArgs, config: HeteroConfig, *, has_cpu: bool) -> None:
    """Raise for the first option that cannot work.

    Args:
        engine_args: what vLLM was asked for.
        config: what this backend was asked for.
        has_cpu: whether the world may have CPU ranks.

    Raises:
        UnsupportedError: the option does not work with CPU ranks or with this backend at all.
        ConfigError: the sizes asked for contradict each other.

    """
    _check_model_path(engine_args.model)
    stages = engine_args.pipeline_parallel_size
    ranks = engine_args.tensor_parallel_size
    _check_layout(config, stages, ranks)
    _check_layers(config, stages)
    _check_restart(engine_args, config)
    for refusal in (*ALWAYS, *(WITH_CPU_RANKS if has_cpu else ())):
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
    if given != [ranks] * stages:
        raise ConfigError(
            f"layout: {len(given)} stages of {given[0]} ranks, but vLLM was asked for "
            f"--pipeline-parallel-size {stages} --tensor-parallel-size {ranks}. "
            f"Type: --pipeline-parallel-size {len(given)} --tensor-parallel-size {given[0]}"
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

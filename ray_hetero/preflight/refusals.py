"""Refusals of unsupported requests, one line each, before anything starts.

Every refusal is a row: what is refused, when it is asked for, why, and what to do instead; the
tables say in which worlds.  docs/compatibility.md shows the rows, and what was seen when they were
tried (`tools/write_compatibility_page.py`).

Checks of what a node or a device has are elsewhere in this room.  Two stand beside what they ask:
an engine of another backend where there is no device (`compat/stand_in.py`, which lends that
process its platform), and a GPU for prompts where there is none (`offload/linear_layers.py`,
which knows the kernel that the process has).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray_hetero.config import HeteroConfig
from ray_hetero.preflight.refusal import Refusal, refuse_first
from ray_hetero.preflight.refused_models import (
    DRAFTED_MODELS,
    MODELS_OF_CPU_GROUPS,
    MODELS_OF_CPU_RANKS,
    MODELS_OF_EXPERT_RANKS,
)
from ray_hetero.preflight.settings import check_settings
from ray_hetero.preflight.unsupported_drafters import (
    METHODS,
    Drafting,
    batches_in_flight,
    is_acceptance_made_up,
    method_found,
    method_named,
    package_missing,
)
from ray_hetero.preflight.unsupported_runner import RANKS_OF_V2_RUNNER, WITH_V2_RUNNER
from ray_hetero.preflight.unsupported_scheduling import Scheduling, obstacle_to_what_is_asked

if TYPE_CHECKING:
    from vllm.config import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs


ALWAYS: Sequence[Refusal[EngineArgs]] = (
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
        "--prefill-context-parallel-size",
        lambda args: args.prefill_context_parallel_size > 1,
        "a layout has pipeline stages and tensor-parallel ranks only",
    ),
)
"""Refused in every world."""

ONLY_V2 = "it needs vLLM's V2 model runner, whose kernels for it have no form for CPUs"
WITH_CPU_RANKS: Sequence[Refusal[EngineArgs]] = (
    Refusal(
        "--speculative-config with the method {found}",
        method_named,
        f"only {', '.join(METHODS)} are known to have all that they need on CPU ranks",
        "Leave it out, or name one of them.",
        seen="What each of them asks for: [speculative decoding](speculation.md).",
    ),
    Refusal(
        "--speculative-config without the package {found}",
        package_missing,
        "the package drafts for this method, and is not installed here",
        "Leave it out, install the package on every node, or take ngram.",
    ),
    Refusal(
        "--enable-sleep-mode",
        lambda args: args.enable_sleep_mode,
        "CPU ranks cannot sleep",
        seen="vLLM's CPU worker ignores it.",
    ),
    Refusal(
        "--decode-context-parallel-size",
        lambda args: args.decode_context_parallel_size > 1,
        "attention on CPUs does not give the sums that it combines",
    ),
    Refusal(
        "--kv-transfer-config",
        lambda args: args.kv_transfer_config,
        "KV blocks of the two kinds have different layouts",
        seen="A pipeline of CPU ranks ran with vLLM's example connector; nothing else was tried.",
    ),
    Refusal(
        "--kv-offloading-size",
        lambda args: args.kv_offloading_size,
        "its connector copies KV blocks from GPUs only",
    ),
    Refusal(
        "VLLM_USE_V2_MODEL_RUNNER=1",
        lambda args: os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1",
        "CPU ranks have the V1 model runner by default",
        "Unset it. For V2 on CPU ranks set cpu.model_runner to v2.",
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

WITH_EXPERT_RANKS: Sequence[Refusal[EngineArgs]] = (
    Refusal(
        "experts.ranks beside --data-parallel-size {found}",
        lambda args: args.data_parallel_size if args.data_parallel_size > 1 else None,
        "the engines of a data-parallel server exchange the tokens of experts",
        "Leave one of them out, or start several servers.",
    ),
    Refusal(
        "experts.ranks beside --enable-expert-parallel",
        lambda args: args.enable_expert_parallel,
        "every expert is divided among the expert ranks already",
    ),
    Refusal(
        "experts.ranks beside --enable-eplb",
        lambda args: args.enable_eplb,
        "it moves experts between GPUs only",
    ),
    Refusal(
        "experts.ranks beside --enable-dbo",
        lambda args: args.enable_dbo,
        "expert ranks compute one batch of a stage at a time",
    ),
    Refusal(
        "experts.ranks beside --enable-lora for all layers, or experts in --lora-target-modules",
        lambda args: args.enable_lora and may_adapt_experts(args.lora_target_modules),
        "stages, to which vLLM adds adapters, have no weights of these experts",
        "Name the layers that adapters are for: --lora-target-modules q_proj k_proj v_proj o_proj.",
        seen="Follows from vLLM's code: it does not start.",
    ),
    Refusal(
        "experts.ranks beside --enable-sleep-mode",
        lambda args: args.enable_sleep_mode,
        "expert ranks keep their experts, and weights that are loaded anew after a deep sleep do "
        "not reach them",
        seen="Follows from vLLM's code: only the ranks of stages are told to sleep, wake and "
        "reload. A light sleep (level 1) was not tried.",
    ),
)
"""Refused where experts lie on sockets beside the stages."""

WITH_RESTARTS: Sequence[Refusal[EngineArgs]] = (
    Refusal(
        "max_restarts beside --data-parallel-size {found}",
        lambda args: args.data_parallel_size if args.data_parallel_size > 1 else None,
        "the engines of a data-parallel server step together",
        "Leave one of them out.",
    ),
    Refusal(
        "max_restarts beside VLLM_ENABLE_V1_MULTIPROCESSING=0",
        lambda args: os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0",
        "the engine that lives on needs a process of its own",
        "Unset the variable, or leave max_restarts out.",
    ),
)
"""Refused where an engine may start its ranks again."""

ENGINES_OF_CPU_RANKS: Sequence[Refusal[ParallelConfig]] = (
    Refusal(
        "--data-parallel-size {found} for a model with experts",
        lambda parallel: parallel.data_parallel_size if parallel.data_parallel_size > 1 else None,
        "its engines exchange tokens, which vLLM cannot between CPU ranks",
        "Leave it out, or start several servers.",
    ),
)
"""Engines beside each other that are refused in a world with CPU ranks.  Engines of a model without
experts are independent, and vLLM has told each by then that it is the only one."""

DRAFTING_OF_CPU_RANKS: Sequence[Refusal[Drafting]] = (
    Refusal(
        "--speculative-config with a drafter of the kind {found}",
        method_found,
        "none was run on CPU ranks yet",
        f"Leave it out, or take one of {', '.join(METHODS)}.",
    ),
    Refusal(
        "--speculative-config with parallel_drafting",
        lambda drafting: drafting.vllm_config.speculative_config.parallel_drafting,
        "no such drafter was run on CPU ranks yet",
        "Set it to false.",
    ),
    Refusal(
        "--speculative-config with pipeline.batches_in_flight {found}",
        batches_in_flight,
        "vLLM's scheduler needs the tokens of one batch before it can have drafts verified in the "
        "next one",
        "Set it to 1, or leave it out.",
    ),
    Refusal(
        "--speculative-config with rejection_sample_method synthetic, and CPU ranks in the last "
        "stage",
        is_acceptance_made_up,
        "vLLM's sampling on CPUs accepts drafts by the model's probabilities only",
        "Leave it out, or write a layout with GPUs in the last stage.",
        seen="The ranks that sample ended in the first step that verified drafts.",
    ),
)
"""Speculative decoding that is refused in a world with CPU ranks."""

SCHEDULING_OF_CPU_RANKS: Sequence[Refusal[Scheduling]] = (
    Refusal(
        "--async-scheduling with {found}",
        obstacle_to_what_is_asked,
        "steps are scheduled ahead where stages of a pipeline wait for each other, one batch after "
        "another, and each request gets one token a step",
    ),
)
"""Asynchronous scheduling that is refused in a world with CPU ranks."""

REFUSALS: Mapping[str, Sequence[Refusal[Any]]] = {
    "always": ALWAYS,
    "with CPU ranks": (
        *WITH_CPU_RANKS,
        *MODELS_OF_CPU_RANKS,
        *MODELS_OF_CPU_GROUPS,
        *ENGINES_OF_CPU_RANKS,
        *DRAFTING_OF_CPU_RANKS,
        *DRAFTED_MODELS,
        *SCHEDULING_OF_CPU_RANKS,
    ),
    "with `cpu.model_runner: v2`": (*WITH_V2_RUNNER, *RANKS_OF_V2_RUNNER),
    "with `max_restarts`": WITH_RESTARTS,
    "with `experts.ranks`": (*WITH_EXPERT_RANKS, *MODELS_OF_EXPERT_RANKS),
}
"""All rows, by the worlds in which they are refused."""


def may_adapt_experts(target_modules: Sequence[str] | None) -> bool:
    """Whether vLLM would look for adapters of routed experts.

    Args:
        target_modules: names of the layers that adapters are for, or ends of them; None is all.

    """
    return target_modules is None or any("experts" in name.split(".") for name in target_modules)


def refuse_unsupported(engine_args: EngineArgs, config: HeteroConfig, *, is_stock: bool) -> None:
    """Raise for the first option that cannot work.

    Args:
        engine_args: what vLLM was asked for.
        config: what this backend was asked for.
        is_stock: whether the ranks are known to be GPUs in stages of one size.

    Raises:
        UnsupportedError: the option does not work with CPU ranks, with stages of several sizes, or
            with this backend at all.
        ConfigError: settings contradict each other.

    """
    check_settings(engine_args, config, is_stock=is_stock)
    asked = [*ALWAYS, *(() if is_stock else WITH_CPU_RANKS)]
    asked += WITH_V2_RUNNER if config.cpu.model_runner == "v2" else ()
    asked += WITH_EXPERT_RANKS if config.experts.ranks not in (0, "auto") else ()
    refuse_first((*asked, *(WITH_RESTARTS if config.max_restarts else ())), engine_args)

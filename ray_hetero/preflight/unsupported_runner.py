"""Engines that cannot have vLLM's V2 model runner on CPU ranks (`cpu.model_runner: v2`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from placement.cluster.layout import Layout
from ray_hetero.compat.worker import v2_runner
from ray_hetero.preflight.refusal import Refusal

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

V1 = "Leave cpu.model_runner out."
UNTRIED = "it has not been run so"
NO_FORM = "its kernels for that are Triton's, and have no form for CPUs yet"


@dataclass(frozen=True)
class RunBy:
    """A model, and the ranks whose model runner is V2."""

    model: ModelConfig
    layout: Layout
    experts: int = 0
    """Number of expert ranks."""


def other_ranks(run: RunBy) -> str | None:
    """Kind of ranks beside CPU ranks; None where there are none."""
    if run.layout.count("gpu"):
        return "GPU ranks"
    return "expert ranks" if run.experts else None


def other_model(run: RunBy) -> str | None:
    """Part or purpose of a model that is no dense decoder of text; None where it is one."""
    model = run.model
    kinds = {
        f"--runner {model.runner_type}": model.runner_type != "generate",
        "images or sound": model.is_multimodal_model,
        "an encoder": model.is_encoder_decoder,
        "diffusion": model.is_diffusion,
        "recurrent states": model.is_hybrid or model.is_attention_free,
        "latent attention": model.use_mla,
        "experts": model.is_moe,
    }
    return next((kind for kind, has_it in kinds.items() if has_it), None)


WITH_V2_RUNNER: Sequence[Refusal[EngineArgs]] = (
    Refusal(
        "cpu.model_runner v2 beside --speculative-config",
        lambda args: args.speculative_config,
        NO_FORM,
        f"Leave one of them out. {V1}",
    ),
    Refusal("cpu.model_runner v2 beside --enable-lora", lambda args: args.enable_lora, UNTRIED, V1),
    Refusal(
        "cpu.model_runner v2 beside --enable-prompt-embeds",
        lambda args: args.enable_prompt_embeds,
        NO_FORM,
        V1,
    ),
    Refusal(
        "cpu.model_runner v2 beside --logits-processors",
        lambda args: args.logits_processors,
        UNTRIED,
        V1,
    ),
    Refusal(
        "cpu.model_runner v2 beside --reasoning-parser or --reasoning-config",
        lambda args: args.reasoning_parser or args.reasoning_config,
        "its kernel that counts the tokens of a thought is Triton's, and has no form for CPUs yet",
        V1,
    ),
    Refusal(
        "cpu.model_runner v2 beside --use-fp64-gumbel",
        lambda args: args.use_fp64_gumbel,
        "random tokens are drawn with numbers of 32 bits",
    ),
    Refusal(
        "cpu.model_runner v2 beside --kv-sharing-fast-prefill",
        lambda args: args.kv_sharing_fast_prefill,
        UNTRIED,
    ),
    Refusal(
        "cpu.model_runner v2 beside --data-parallel-size {found}",
        lambda args: args.data_parallel_size if args.data_parallel_size > 1 else None,
        UNTRIED,
        V1,
    ),
)
"""Options that are refused where CPU ranks are to have the V2 model runner."""

RANKS_OF_V2_RUNNER: Sequence[Refusal[RunBy]] = (
    Refusal(
        "cpu.model_runner v2 with vLLM {found}",
        lambda _: v2_runner.other_release(),
        "its runner calls some of the kernels in another way, for which there are no forms yet",
        f"Take vLLM 0.32. {V1}",
    ),
    Refusal(
        "cpu.model_runner v2 with {found}",
        other_ranks,
        "it is for layouts of CPU ranks alone, whose samples all come from the same kernels",
        f'Write such a layout, for example "layout": [["cpu"], ["cpu"]]. {V1}',
    ),
    Refusal(
        "cpu.model_runner v2 for a model with {found}",
        other_model,
        "only dense decoders of text were run with it",
        V1,
    ),
)
"""Ranks and models that are refused there."""

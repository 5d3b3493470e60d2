"""Models that are refused where CPU ranks or expert ranks are to compute them, a row each."""

from __future__ import annotations

from collections.abc import Sequence

from placement.cluster.layout import Layout
from ray_hetero.preflight.refusal import Refusal, refuse_first
from ray_hetero.preflight.unsupported_checkpoints import (
    CheckpointOnCpus,
    architecture_without_kernel,
    experts_without_gate,
    experts_without_kernel,
    layers_only_streamed,
    layers_without_kernel,
    short_convolutions,
    sparse_activations,
    sparse_attention,
)
from ray_hetero.preflight.unsupported_drafters import (
    DraftedModel,
    has_draft_model_beside_states,
    has_recurrent_states,
)

KERNELS_LEFT_OUT = "Leave cpu.linear_kernel out."
WITHOUT_GATE = (
    "The ranks ended while they made the model: is_act_and_mul=False is supported only for CUDA, "
    "XPU and ROCm for now."
)
MODELS_OF_CPU_RANKS: Sequence[Refusal[CheckpointOnCpus]] = (
    Refusal(
        "a CPU stage without the CPU kernels of vLLM {found}",
        lambda checkpoint: checkpoint.lacks_kernels,
        "its attention and norms are vLLM's, and the build for CUDA has none for CPUs, which only "
        "expert ranks do without",
        "Type: ray-hetero install-cpu-kernels, or write a layout without CPU ranks.",
    ),
    Refusal(
        "a checkpoint with {found} layers",
        layers_without_kernel,
        "vLLM loads them for kernels of GPUs only",
        "Take the model as 8-bit integers, 4-bit AWQ or GPTQ, or unquantised, or write a layout "
        "without CPU ranks.",
        seen="Which formats CPU ranks compute: the tables below.",
    ),
    Refusal(
        "cpu.linear_kernel vllm beside a checkpoint with {found} layers",
        layers_only_streamed,
        "vLLM has no CPU kernel for them, and this project's kernels are not to be taken",
        KERNELS_LEFT_OUT,
    ),
    Refusal(
        "cpu.linear_kernel vllm beside experts without a gate ({found})",
        experts_without_gate,
        "vLLM computes such experts on GPUs only, and this project's kernels are not to be taken",
        KERNELS_LEFT_OUT,
        seen=WITHOUT_GATE,
    ),
    Refusal(
        "a mixture of experts in {found}",
        experts_without_kernel,
        "vLLM has no CPU form of experts in this format, which this project's kernel takes the "
        "place of",
        "Take the model as FP8 in blocks, as 4-bit integers, or unquantised, or write a layout "
        "without CPU ranks.",
    ),
    Refusal(
        "a model with {found} layers",
        architecture_without_kernel,
        "vLLM's CPU kernels lack their selective scan",
        "Write a layout without CPU ranks.",
    ),
    Refusal(
        "a model with {found} convolutions",
        short_convolutions,
        "vLLM's layers for them on CPUs give other tokens than Transformers, without a warning",
        "Write a layout without CPU ranks.",
        seen="Random LFM2 checkpoints in float32: stock vLLM on a CPU differs from Transformers "
        "from the second to the eighth token on.",
    ),
    Refusal(
        "a model with {found}",
        sparse_attention,
        "neither vLLM nor this project has CPU kernels for it",
        "Keep attention on GPUs: leave the layout out where they hold all but the routed experts, "
        "which expert ranks compute, or write a layout without CPU ranks.",
        seen="The ranks ended while they loaded the model: vLLM's CPU platform has no such "
        "backend.",
    ),
)
"""Models that are refused in a world with CPU ranks."""

MODELS_OF_CPU_GROUPS: Sequence[Refusal[CheckpointOnCpus]] = (
    Refusal(
        "a tensor-parallel stage of a model with {found}",
        sparse_activations,
        "vLLM keeps the largest activations of each rank's part of an MLP, not of the whole, so "
        "that tokens are others",
        "Write a layout with stages of one rank.",
        seen="A random Gemma 3n checkpoint in float32: logits of two ranks differ from one rank's "
        "by 10 %.",
    ),
)
"""Models that are refused where CPU ranks divide layers."""

MODELS_OF_EXPERT_RANKS: Sequence[Refusal[CheckpointOnCpus]] = (
    Refusal(
        "experts.ranks for a mixture of experts in {found}",
        experts_without_kernel,
        "this project has no kernels for experts in this format",
        "Take the model as FP8 in blocks, as 4-bit integers, or unquantised, or leave the experts "
        'on the GPUs: "experts": {"ranks": 0}.',
    ),
    Refusal(
        "experts.ranks with cpu.linear_kernel vllm for experts without a gate ({found})",
        experts_without_gate,
        "vLLM computes such experts on GPUs only, and this project's kernels are not to be taken",
        KERNELS_LEFT_OUT,
        seen=WITHOUT_GATE,
    ),
)
"""Models that are refused where expert ranks are to compute their experts."""

DRAFTED_MODELS: Sequence[Refusal[DraftedModel]] = (
    Refusal(
        "--speculative-config with a pipeline of a model with recurrent states",
        has_recurrent_states,
        "the states go back by as many tokens as were refused, which only the last stage knows",
        "Write a layout of one stage, or leave it out.",
        seen="Follows from vLLM's code.",
    ),
    Refusal(
        "--speculative-config with the method draft_model for a model with recurrent states",
        has_draft_model_beside_states,
        "vLLM divides the layers of the draft model among several groups of its KV cache, and "
        "drafts from one",
        "Take the method ngram, or leave it out.",
        seen="The ranks ended at their start: all drafting layers should belong to the same group.",
    ),
)
"""Models whose tokens are not drafted in a world with CPU ranks."""


def refuse_drafts(layout: Layout, *, has_states: bool, has_draft_model: bool = False) -> None:
    """Raise for a model whose drafts these ranks cannot verify.

    The engine asks before it starts ranks, the choice of a layout and `ray-hetero plan` before
    they propose them.

    Args:
        layout: stages of the engine.
        has_states: whether layers of the model keep a state in the place of keys and values.
        has_draft_model: whether a model of its own drafts for it.

    Raises:
        UnsupportedError: says what does not work, and what to do instead.

    """
    if layout.count("cpu") or not layout.is_even:
        refuse_first(DRAFTED_MODELS, DraftedModel(layout, has_states, has_draft_model))


def refuse_ranks(checkpoint: CheckpointOnCpus, layout: Layout, experts: int = 0) -> None:
    """Raise for a model that CPU ranks or expert ranks cannot compute.

    The engine asks before it starts ranks, the choice of a layout and `ray-hetero plan` before
    they propose them.

    Args:
        checkpoint: the model.
        layout: stages of the engine.
        experts: number of expert ranks beside them.

    Raises:
        UnsupportedError: says what they lack, and what to do instead.

    """
    if layout.count("cpu"):
        refuse_first(MODELS_OF_CPU_RANKS, checkpoint)
        if layout.tensor_parallel_size > 1:
            refuse_first(MODELS_OF_CPU_GROUPS, checkpoint)
    if experts:
        refuse_first(MODELS_OF_EXPERT_RANKS, checkpoint)

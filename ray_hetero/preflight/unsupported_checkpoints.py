"""Models that CPU ranks cannot compute: nobody has a CPU kernel for their layers.

Which formats of quantised checkpoints have one is said in compat/models/checkpoint_formats.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from placement.model.config import EXPERT_KEYS
from ray_hetero.compat.models.checkpoint_formats import CheckpointFormat, Kernel, formats_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig

MODEL_TYPES = {"mamba": "Mamba"}
"""Architectures without a kernel → what the layers are: their selective scan is not there."""
WITHOUT_GATE = ("nemotron_h", "nemotron_h_puzzle")
"""Architectures whose experts have no gate: an activation stands between their two matrices."""
LAYER_KEYS = ("hybrid_override_pattern", "layers_block_type", "layer_types")
"""Keys under which these architectures say what each layer is; E or moe has experts."""
SHORT_CONVOLUTIONS = ("lfm2", "lfm2_moe")
"""Architectures of which most layers are gated convolutions over a few tokens."""
KEPT = ("ignore", "modules_to_not_convert", "exclude_modules")
"""Keys under which a checkpoint names modules that it does not quantise."""


@dataclass(frozen=True)
class CheckpointOnCpus:
    """A checkpoint, and what is to compute it on CPU ranks."""

    method: str
    """Name of its quantisation, vLLM's or the checkpoint's own."""
    scheme: Mapping[str, Any]
    """`quantization_config` of the checkpoint; empty where it has none."""
    model_type: str
    has_experts: bool
    """Whether it is a mixture of experts."""
    linear_kernel: str
    """Setting `cpu.linear_kernel`."""
    text: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of the language model: `text_config`, or the whole."""
    lacks_kernels: str = ""
    """Release of vLLM whose CPU kernels its only host lacks; empty where they are there, or are
    looked for later."""

    @classmethod
    def of_model(cls, model: ModelConfig, linear_kernel: str) -> CheckpointOnCpus:
        """Take what vLLM knows about a model."""
        text = model.hf_text_config.to_dict()
        nested = text.get("quantization_config")
        scheme = getattr(model.hf_config, "quantization_config", None) or nested or {}
        return cls(
            str(model.quantization),
            scheme,
            model.hf_config.model_type,
            has_experts=model.get_num_experts() > 0,
            linear_kernel=linear_kernel,
            text=text,
        )

    @classmethod
    def of_config(cls, config: Mapping[str, Any], linear_kernel: str) -> CheckpointOnCpus:
        """Take what the `config.json` of a checkpoint says."""
        nested = config.get("text_config")
        text = nested if isinstance(nested, Mapping) else config
        given = config.get("quantization_config") or text.get("quantization_config")
        scheme = given if isinstance(given, Mapping) else {}
        return cls(
            str(scheme.get("quant_method", "")),
            scheme,
            str(config.get("model_type", "")),
            has_experts=any(text.get(key) for key in EXPERT_KEYS),
            linear_kernel=linear_kernel,
            text=text,
        )


def layers_without_kernel(checkpoint: CheckpointOnCpus) -> str | None:
    """Reason why layers of a checkpoint have no CPU kernel; None where all have, or unknown."""
    return _first(checkpoint, lambda one: one.linear is Kernel.NOBODY)


def layers_only_streamed(checkpoint: CheckpointOnCpus) -> str | None:
    """Reason why vLLM's own kernels, if asked for, cannot compute layers of a checkpoint."""
    if checkpoint.linear_kernel != "vllm":
        return None
    return _first(checkpoint, lambda one: one.linear is Kernel.STREAMED)


def experts_without_kernel(checkpoint: CheckpointOnCpus) -> str | None:
    """Reason why routed experts of a checkpoint have no CPU kernel; None where nobody knows."""
    if not checkpoint.has_experts or _keeps_experts(checkpoint.scheme):
        return None
    return _first(checkpoint, lambda one: not one.has_experts)


def experts_without_gate(checkpoint: CheckpointOnCpus) -> str | None:
    """Activation of experts without a gate, which vLLM's own kernels, if asked for, do not take."""
    text = checkpoint.text
    if (
        checkpoint.linear_kernel != "vllm"
        or text.get("model_type", checkpoint.model_type) not in WITHOUT_GATE
    ):
        return None
    kinds = next((text[key] for key in LAYER_KEYS if text.get(key)), "E")
    return text.get("mlp_hidden_act", "relu2") if {"E", "moe"} & set(kinds) else None


def _first(checkpoint: CheckpointOnCpus, lacks: Callable[[CheckpointFormat], bool]) -> str | None:
    """The name of the first format of a checkpoint that lacks something."""
    formats = formats_of(checkpoint.method, checkpoint.scheme)
    return next((one.name for one in formats if lacks(one)), None)


def architecture_without_kernel(checkpoint: CheckpointOnCpus) -> str | None:
    """Reason why layers of an architecture have no CPU kernel; None where all have, or unknown."""
    return MODEL_TYPES.get(checkpoint.model_type)


def sparse_activations(checkpoint: CheckpointOnCpus) -> str | None:
    """Name of the activations of which an MLP keeps the largest; None where it keeps all."""
    pattern = checkpoint.text.get("activation_sparsity_pattern")
    # One number stands for all layers.
    shares = pattern if isinstance(pattern, list) else [pattern]
    is_sparse = any(isinstance(share, float) and share > 0 for share in shares)
    return "sparse activations" if is_sparse else None


def short_convolutions(checkpoint: CheckpointOnCpus) -> str | None:
    """The word "short" for a model with such convolutions; None where it has none."""
    is_one = checkpoint.text.get("model_type", checkpoint.model_type) in SHORT_CONVOLUTIONS
    return "short" if is_one else None


def sparse_attention(checkpoint: CheckpointOnCpus) -> str | None:
    """The sparse attention of a model, as its configuration names it; None where it has none.

    DeepSeek V3.2 and V4, GLM-5 and their relatives say how many tokens their indexer keeps;
    MiniMax M3 has a section of its own.
    """
    kept = checkpoint.text.get("index_topk")
    if kept:
        return f"sparse attention (an indexer keeps {kept} tokens)"
    return "sparse attention" if checkpoint.text.get("sparse_attention_config") else None


def _keeps_experts(scheme: Mapping[str, Any]) -> bool:
    """Whether routed experts are not quantised."""
    names = (str(name) for key in KEPT for name in scheme.get(key) or ())
    return any("experts" in name and "shared" not in name for name in names)

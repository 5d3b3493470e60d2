"""Models that CPU ranks cannot compute: nobody has a CPU kernel for their layers.

Each entry was tried on a CPU: an engine, or the layers of a model as vLLM loads them.  Formats that
depend on the processor (8-bit floats need AMX in vLLM's own kernels) are for the rank to find out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from placement.model.config import EXPERT_KEYS

if TYPE_CHECKING:
    from vllm.config import ModelConfig

METHODS = {"modelopt_mxfp8": "MXFP8", "fbgemm_fp8": "FBGEMM FP8"}
"""vLLM's name of a method → what the layers are."""
MODELOPT = {
    "NVFP4": "modelopt_fp4", "W4A16_NVFP4": "modelopt_fp4", "MXFP8": "modelopt_mxfp8",
}  # fmt: skip
"""ModelOpt's name of an algorithm → vLLM's of the method."""
NVFP4, NVFP4_ALONE = "NVFP4", "NVFP4 weight-only"
STREAMED = (NVFP4, "8-bit int weight-only", "8-bit float weight-only")
"""Formats of linear layers that this project's kernels compute, and vLLM's on CPUs do not."""
ONE_SCALE = "FP8 with one scale"
"""Experts of it are rounded to the scale of an expert, by an operator that vLLM's CPU build only
declares; linear layers keep their scales (compat/quantised_kernels.py)."""
MODEL_TYPES = {"mamba": "Mamba"}
"""Architectures without a kernel → what the layers are: their selective scan is not there."""
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

    @classmethod
    def of_model(cls, model: ModelConfig, linear_kernel: str) -> CheckpointOnCpus:
        """Take what vLLM knows about a model."""
        scheme = getattr(model.hf_config, "quantization_config", None) or {}
        return cls(
            str(model.quantization),
            scheme,
            model.hf_config.model_type,
            has_experts=model.get_num_experts() > 0,
            linear_kernel=linear_kernel,
        )

    @classmethod
    def of_config(cls, config: Mapping[str, Any], linear_kernel: str) -> CheckpointOnCpus:
        """Take what the `config.json` of a checkpoint says."""
        scheme = config.get("quantization_config") or {}
        return cls(
            str(scheme.get("quant_method", "")),
            scheme,
            str(config.get("model_type", "")),
            has_experts=any(config.get(key) for key in EXPERT_KEYS),
            linear_kernel=linear_kernel,
        )


def layers_without_kernel(checkpoint: CheckpointOnCpus) -> str | None:
    """What layers of a checkpoint have no CPU kernel; None where all have, or nobody knows."""
    return next((one for one in _formats(checkpoint) if one not in (*STREAMED, ONE_SCALE)), None)


def layers_only_streamed(checkpoint: CheckpointOnCpus) -> str | None:
    """What layers of a checkpoint have no CPU kernel, as vLLM's own are to compute them."""
    if checkpoint.linear_kernel != "vllm":
        return None
    return next((one for one in _formats(checkpoint) if one in STREAMED), None)


def experts_without_kernel(checkpoint: CheckpointOnCpus) -> str | None:
    """What routed experts of a checkpoint have no CPU kernel; None where nobody knows."""
    if not checkpoint.has_experts or _keeps_experts(checkpoint.scheme):
        return None
    return next((one for one in _formats(checkpoint) if one in (*STREAMED, ONE_SCALE)), None)


def architecture_without_kernel(checkpoint: CheckpointOnCpus) -> str | None:
    """What layers of an architecture have no CPU kernel; None where all have, or nobody knows."""
    return MODEL_TYPES.get(checkpoint.model_type)


def _keeps_experts(scheme: Mapping[str, Any]) -> bool:
    """Whether routed experts are not quantised."""
    names = (str(name) for key in KEPT for name in scheme.get(key) or ())
    return any("experts" in name and "shared" not in name for name in names)


def _formats(checkpoint: CheckpointOnCpus) -> Iterator[str]:
    """Formats of a checkpoint's layers for which something lacks a CPU kernel."""
    method, scheme = checkpoint.method, checkpoint.scheme
    algorithm = str(scheme.get("quant_algo", ""))
    if method == "modelopt":
        method = MODELOPT.get(algorithm, method)
    if method in METHODS:
        yield METHODS[method]
    elif method == "modelopt_fp4":
        groups = _groups(scheme)
        is_alone = algorithm not in ("", NVFP4)
        has_none = bool(groups) and not any(group.get("input_activations") for group in groups)
        yield NVFP4_ALONE if is_alone or has_none else NVFP4
    elif "gptq" in method and scheme.get("bits") == 8:
        yield "8-bit GPTQ"
    elif method == "fp8" and scheme.get("quant_method") == "fp8":
        if not scheme.get("weight_block_size"):
            yield ONE_SCALE
    elif method == "compressed-tensors":
        for group in _groups(scheme):
            yield from _compressed(group, group.get("format") or scheme.get("format"))


def _groups(scheme: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = scheme.get("config_groups")
    return list(groups.values()) if isinstance(groups, Mapping) else []


def _compressed(group: Mapping[str, Any], stored: object) -> Iterator[str]:
    weights, activations = group.get("weights") or {}, group.get("input_activations")
    kind = weights.get("type", "")
    if stored == "nvfp4-pack-quantized":
        yield NVFP4 if activations else NVFP4_ALONE
    elif weights.get("num_bits") != 8:
        return
    elif not activations:
        yield f"8-bit {kind} weight-only"
    elif kind == "float" and weights.get("strategy") == "tensor":
        yield ONE_SCALE

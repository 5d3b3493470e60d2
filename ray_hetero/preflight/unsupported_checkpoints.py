"""Models that CPU ranks cannot compute: vLLM has no CPU kernel for their layers.

Each entry was tried: an engine or one linear layer of the format, on a CPU.  Formats that depend on
the processor (8-bit floats need AMX in some of their forms) are for the rank to find out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig

METHODS = {
    "modelopt_fp4": "NVFP4",
    "modelopt_mxfp8": "MXFP8",
    "fbgemm_fp8": "FBGEMM FP8",
}
"""vLLM's name of a method → what the layers are."""
FORMATS = {"nvfp4-pack-quantized": "NVFP4"}
"""The same for formats of compressed-tensors."""
MODEL_TYPES = {"mamba": "Mamba"}
"""The same for architectures: their selective scan is not there."""


def layers_without_kernel(model: ModelConfig) -> str | None:
    """What quantised layers of a model have no CPU kernel; None where all have, or nobody knows."""
    scheme = getattr(model.hf_config, "quantization_config", None) or {}
    return without_kernel(str(model.quantization), scheme)


def architecture_without_kernel(model: ModelConfig) -> str | None:
    """What layers of an architecture have no CPU kernel; None where all have, or nobody knows."""
    return MODEL_TYPES.get(model.hf_config.model_type)


def without_kernel(method: str, scheme: Mapping[str, Any]) -> str | None:
    """What layers of a checkpoint have no CPU kernel; None where all have, or nobody knows.

    Args:
        method: vLLM's name of the quantisation.
        scheme: `quantization_config` of the checkpoint.

    """
    if method in METHODS:
        return METHODS[method]
    if "gptq" in method and scheme.get("bits") == 8:
        return "8-bit GPTQ"
    if method != "compressed-tensors":
        return None
    return next(_unknown(scheme), None)


def _unknown(scheme: Mapping[str, Any]) -> Iterator[str]:
    groups = scheme.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        stored = group.get("format") or scheme.get("format")
        weights, activations = group.get("weights") or {}, group.get("input_activations")
        if stored in FORMATS:
            yield FORMATS[stored]
        elif weights.get("num_bits") == 8 and not activations:
            yield f"8-bit {weights.get('type', '')} weight-only"

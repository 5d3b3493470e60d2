"""Formats of quantised checkpoints, by what vLLM and the checkpoints call them, and who has a CPU
kernel for their layers.

Nothing here imports vLLM, so that `ray-hetero plan` can ask without it.

Each entry was tried on a CPU: an engine, or the layers of a model as vLLM loads them.  Formats that
depend on the processor (8-bit floats need AMX in vLLM's own kernels) are for the rank to find out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kernel(Enum):
    """Whose kernels compute the layers of a format on a CPU."""

    NOBODY = "nobody's"
    STREAMED = "this project's alone"
    ANY = "this project's and vLLM's"


@dataclass(frozen=True)
class CheckpointFormat:
    """A format for which something lacks a CPU kernel; those that lack nothing are not described.

    A format for which a kernel has been written changes here from `Kernel.NOBODY`.
    """

    name: str
    """Name of the format for people."""
    linear: Kernel
    """Kernels of linear layers."""
    has_experts: bool = False
    """Whether there is a kernel for routed experts."""


MXFP8 = CheckpointFormat("MXFP8", Kernel.STREAMED, has_experts=True)
FBGEMM_FP8 = CheckpointFormat("FBGEMM FP8", Kernel.NOBODY)
GPTQ_OF_BYTES = CheckpointFormat("8-bit GPTQ", Kernel.NOBODY)
NVFP4 = CheckpointFormat("NVFP4", Kernel.STREAMED, has_experts=True)
NVFP4_ALONE = CheckpointFormat("NVFP4 weight-only", Kernel.NOBODY)
BYTES_ALONE = {
    kind: CheckpointFormat(f"8-bit {kind} weight-only", Kernel.STREAMED)
    for kind in ("int", "float")
}
"""Formats of weights of eight bits beside activations that are not quantised, by their type."""
ONE_SCALE = CheckpointFormat("FP8 with one scale", Kernel.ANY)
"""Experts of it are rounded to the scale of an expert, by an operator that vLLM's CPU build only
declares; linear layers keep their scales (`quantised_kernels.keep_scales_of_parts`)."""

METHODS = {"modelopt_mxfp8": MXFP8, "fbgemm_fp8": FBGEMM_FP8}
"""vLLM's name of a method → its only format."""
MODELOPT = {
    "NVFP4": "modelopt_fp4", "W4A16_NVFP4": "modelopt_fp4", "MXFP8": "modelopt_mxfp8",
}  # fmt: skip
"""ModelOpt's name of an algorithm → vLLM's of the method."""


def formats_of(method: str, scheme: Mapping[str, Any]) -> Iterator[CheckpointFormat]:
    """Formats of a checkpoint's layers for which something lacks a CPU kernel.

    Args:
        method: name of the quantisation, vLLM's or the checkpoint's own.
        scheme: `quantization_config` of the checkpoint.

    """
    algorithm = str(scheme.get("quant_algo", ""))
    if method == "modelopt":
        method = MODELOPT.get(algorithm, method)
    if method in METHODS:
        yield METHODS[method]
    elif method == "modelopt_fp4":
        groups = _groups(scheme)
        is_alone = algorithm not in ("", "NVFP4")
        has_none = bool(groups) and not any(group.get("input_activations") for group in groups)
        yield NVFP4_ALONE if is_alone or has_none else NVFP4
    elif "gptq" in method and scheme.get("bits") == 8:
        yield GPTQ_OF_BYTES
    elif method == "fp8" and scheme.get("quant_method") == "fp8":
        if not scheme.get("weight_block_size"):
            yield ONE_SCALE
    elif method == "compressed-tensors":
        for group in _groups(scheme):
            yield from _compressed(group, group.get("format") or scheme.get("format"))


def _groups(scheme: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = scheme.get("config_groups")
    return list(groups.values()) if isinstance(groups, Mapping) else []


def _compressed(group: Mapping[str, Any], stored: object) -> Iterator[CheckpointFormat]:
    weights, activations = group.get("weights") or {}, group.get("input_activations")
    kind = weights.get("type", "")
    if stored == "nvfp4-pack-quantized":
        yield NVFP4 if activations else NVFP4_ALONE
    elif stored == "mxfp8-quantized":
        yield MXFP8
    elif weights.get("num_bits") != 8:
        return
    elif not activations:
        yield BYTES_ALONE.get(kind) or CheckpointFormat(f"8-bit {kind} weight-only", Kernel.NOBODY)
    elif kind == "float" and weights.get("strategy") == "tensor":
        yield ONE_SCALE

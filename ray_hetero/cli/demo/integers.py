"""Linear layers in integers of four or eight bits, as three tools store them.

compressed-tensors has integers alone (W4A16, W8A16), or eight bits of weights and activations
(W8A8); AutoGPTQ is symmetric, here without act-order; AutoAWQ has zero points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray_hetero.cli.demo.compressed_tensors import compressed_tensors

BITS = 4
LARGEST = 127
"""Largest value of a signed byte whose range is symmetric."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Number of the output, of eight neighbouring ones, at each place in a word, lowest bits first."""


@dataclass(frozen=True)
class Rounded:
    """W [N, K] ≈ (codes - zeros) · scales, each zero point and scale for a group."""

    codes: Any
    """[N, K], int32, from 0 on."""
    zeros: Any
    """[N, groups], int32."""
    scales: Any
    """[N, groups], float32."""


def rounded(
    weight: Any, group: int, scale_type: Any, *, has_zeros: bool, bits: int = BITS
) -> Rounded:
    """Round a weight.

    Args:
        weight: [N, K], float32.
        group: inputs that share a scale.
        scale_type: scales are rounded to it first.
        has_zeros: whether each group uses its own range; else the middle of the codes stands for 0.
        bits: of a code.

    """
    import torch

    most_codes = 1 << bits
    outputs, inputs = weight.shape
    groups = weight.view(outputs, inputs // group, group)
    if has_zeros:
        least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((most - least) / (most_codes - 1)).to(scale_type).float()
        zeros = (-least / scales).round().clamp(0, most_codes - 1)
    else:
        scales = (groups.abs().amax(-1) / (most_codes / 2 - 1)).to(scale_type).float()
        zeros = torch.full_like(scales, most_codes // 2)
    codes = (groups / scales[..., None]).round() + zeros[..., None]
    return Rounded(
        codes.clamp(0, most_codes - 1).to(torch.int32).view(outputs, inputs),
        zeros.to(torch.int32),
        scales,
    )


def packed(codes: Any, order: tuple[int, ...] | None = None, *, bits: int = BITS) -> Any:
    """Neighbouring codes of the last dimension in one int32, from its lowest bits on.

    Args:
        codes: […, a multiple of the codes of a word], int32.
        order: which of a word's codes lies where; as they come if not given.
        bits: of a code.

    """
    import torch

    many = 32 // bits
    each = codes.reshape(*codes.shape[:-1], -1, many)[..., list(order or range(many))]
    words = (each.to(torch.int64) << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def packed_scheme(
    group: int, ignored: Sequence[str], *, has_zeros: bool = False, bits: int = BITS
) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors for integers alone."""
    weights = {
        "num_bits": bits, "type": "int", "symmetric": not has_zeros, "strategy": "group",
        "group_size": group,
    }  # fmt: skip
    return compressed_tensors("pack-quantized", ignored, weights)


def packed_tensors(
    weight: Any, group: int, *, has_zeros: bool = False, bits: int = BITS
) -> dict[str, Any]:
    """Packed codes, scales and maybe zero points of a weight [N, K]."""
    import torch

    made = rounded(weight, group, torch.bfloat16, has_zeros=has_zeros, bits=bits)
    stored = {
        "weight_packed": packed(made.codes, bits=bits),
        "weight_scale": made.scales.to(torch.bfloat16),
        "weight_shape": torch.tensor(weight.shape),
    }
    if has_zeros:
        stored["weight_zero_point"] = packed(made.zeros.t(), bits=bits).t()
    return stored


def bytes_scheme(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors for W8A8; there are no groups.

    Integer products on both kinds of device: of weights with one scale an output and activations
    with one scale a token, both symmetric.
    """
    byte = {"num_bits": 8, "type": "int", "symmetric": True}
    tokens = {**byte, "strategy": "token", "dynamic": True}
    return compressed_tensors("int-quantized", ignored, {**byte, "strategy": "channel"}, tokens)


def bytes_tensors(weight: Any, group: int) -> dict[str, Any]:
    """Bytes and scales of a weight [N, K]."""
    import torch

    scale = weight.abs().amax(dim=1, keepdim=True) / LARGEST
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def gptq_scheme(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of AutoGPTQ; output matrices are left out without a word."""
    return {
        "quant_method": "gptq", "bits": BITS, "group_size": group, "desc_act": False, "sym": True,
        "lm_head": False, "checkpoint_format": "gptq",
    }  # fmt: skip


def gptq_tensors(weight: Any, group: int) -> dict[str, Any]:
    """Codes packed along the inputs, scales, zero points less 1, and the inputs' groups."""
    import torch

    made = rounded(weight, group, torch.float16, has_zeros=False)
    return {
        "qweight": packed(made.codes).t(),
        "qzeros": packed(made.zeros.t() - 1),
        "scales": made.scales.t().to(torch.float16),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // group,
    }


def awq_scheme(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of AutoAWQ."""
    return {
        "quant_method": "awq", "bits": BITS, "group_size": group, "zero_point": True,
        "version": "gemm", "modules_to_not_convert": list(ignored),
    }  # fmt: skip


def awq_tensors(weight: Any, group: int) -> dict[str, Any]:
    """Codes packed along the outputs, scales and zero points."""
    import torch

    made = rounded(weight, group, torch.float16, has_zeros=True)
    return {
        "qweight": packed(made.codes.t(), AWQ_ORDER),
        "qzeros": packed(made.zeros.t(), AWQ_ORDER),
        "scales": made.scales.t().to(torch.float16),
    }

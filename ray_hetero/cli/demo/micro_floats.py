"""Linear layers in floats with scales for small groups: MXFP4, MXFP8 and NVFP4.

As compressed-tensors stores them, NVFP4 also as ModelOpt does.  MXFP4 and MXFP8 have groups of 32
with powers of two, NVFP4 groups of 16 with scales in E4M3, and one factor of a layer for these.
Activations are as short as the weights (MXFP8, NVFP4), where a device multiplies those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray_hetero.cli.demo.compressed_tensors import compressed_tensors

GROUP = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7 of four bits; the fourth bit is the sign."""
LARGEST_OF_BYTES = 448.0
"""Largest value of a code of eight bits."""
BIAS = 127
"""Bias of the exponents."""
NV_GROUP = 16
NV_DIVISOR = 128.0
"""Divisor of the scales of a layer: the same for the parts of a fused layer, of which vLLM takes
one for all.  Weights may be up to 21; some of trained models are above 2."""


def _floats(bits: int) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": "float", "symmetric": True, "strategy": "group",
        "group_size": GROUP, "scale_dtype": "torch.uint8",
    }  # fmt: skip


def mxfp4_scheme(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of the checkpoint, whose groups are those of the format."""
    return compressed_tensors("mxfp4-pack-quantized", ignored, _floats(4))


def mxfp4_tensors(weight: Any, group: int) -> dict[str, Any]:
    """Two codes a byte and exponents of a weight [N, K]."""
    scaled, exponents = _scaled(weight, VALUES[-1])
    return {"weight_packed": _two_a_byte(nearest_codes(scaled)), "weight_scale": exponents}


def mxfp8_scheme(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of the checkpoint, whose groups are those of the format."""
    tokens = {**_floats(8), "dynamic": True}
    return compressed_tensors("mxfp8-quantized", ignored, _floats(8), tokens)


def mxfp8_tensors(weight: Any, group: int) -> dict[str, Any]:
    """Codes and exponents of a weight [N, K]."""
    import torch

    scaled, exponents = _scaled(weight, LARGEST_OF_BYTES)
    return {"weight": scaled.to(torch.float8_e4m3fn), "weight_scale": exponents}


def nvfp4_scheme(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of the checkpoint, whose groups are those of the format."""
    floats = {
        "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group",
        "group_size": NV_GROUP,
    }  # fmt: skip
    tokens = {**floats, "dynamic": "local"}
    return compressed_tensors("nvfp4-pack-quantized", ignored, floats, tokens)


def modelopt_scheme(group: int, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of a checkpoint in NVFP4 as ModelOpt writes it."""
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": NV_GROUP,
        "ignore": list(ignored),
    }


def nvfp4_tensors(weight: Any, group: int) -> dict[str, Any]:
    """Two codes a byte, scales of groups, and what divides these, of a weight [N, K]."""
    import torch

    groups = weight.view(len(weight), -1, NV_GROUP)
    scales = (groups.abs().amax(-1) / VALUES[-1] * NV_DIVISOR).to(torch.float8_e4m3fn)
    codes = nearest_codes(groups / (scales.float() / NV_DIVISOR)[..., None])
    return {
        "weight_packed": _two_a_byte(codes.view(weight.shape)),
        "weight_scale": scales,
        "weight_global_scale": torch.tensor([NV_DIVISOR]),
        "input_global_scale": torch.tensor([1.0]),
    }


def modelopt_tensors(weight: Any, group: int) -> dict[str, Any]:
    """Tensors of a weight [N, K] in NVFP4 by ModelOpt's names, which has factors for divisors."""
    stored = nvfp4_tensors(weight, group)
    return {
        "weight": stored["weight_packed"],
        "weight_scale": stored["weight_scale"],
        "weight_scale_2": 1 / stored["weight_global_scale"][0],
        "input_scale": 1 / stored["input_global_scale"][0],
    }


def _scaled(weight: Any, largest: float) -> tuple[Any, Any]:
    """A weight [N, K] by powers of two of its groups, and these as stored exponents [N, groups]."""
    import torch

    groups = weight.view(len(weight), -1, GROUP)
    exponents = torch.ceil(torch.log2(groups.abs().amax(-1) / largest))
    scaled = groups / torch.exp2(exponents)[..., None]
    return scaled.view(weight.shape), (exponents + BIAS).to(torch.uint8)


def _two_a_byte(codes: Any) -> Any:
    pairs = codes.view(len(codes), -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def nearest_codes(scaled: Any) -> Any:
    """The codes of four bits whose values are nearest, uint8."""
    import torch

    nearest = (scaled.abs()[..., None] - torch.tensor(VALUES)).abs().argmin(-1)
    return (nearest | (scaled < 0) * 8).to(torch.uint8)

"""Quantised demo checkpoints as plain ones: the weights that a kernel has to multiply with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where each of eight neighbouring outputs lies in a word."""
MX_BIAS = 127


def dequantised(quantised: Path, plain: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the checkpoint in `quantised` to `plain`, its linear layers in another type."""
    shutil.copytree(quantised, plain)
    config = json.loads((plain / "config.json").read_text())
    scheme = config.pop("quantization_config")
    (plain / "config.json").write_text(json.dumps(config))
    tensors = load_file(quantised / "model.safetensors")
    layers: dict[str, dict[str, torch.Tensor]] = {}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, end = name.rpartition(".")
        if "norm" in layer or "embed" in layer or layer == "lm_head" or end.endswith("bias"):
            state[name] = tensor
        else:
            layers.setdefault(layer, {})[end] = tensor
    for layer, parts in layers.items():
        if parts.keys() == {"weight"}:
            state[f"{layer}.weight"] = parts["weight"]  # of a router
            continue
        state[f"{layer}.weight"] = weight_of(parts, scheme).to(dtype).contiguous()
    save_file(state, plain / "model.safetensors", metadata={"format": "pt"})
    return plain


def weight_of(parts: dict[str, torch.Tensor], scheme: dict[str, Any]) -> torch.Tensor:
    """W [N, K] of one layer, float32."""
    method = scheme["quant_method"]
    if method == "fp8" and "weight_block_size" in scheme:
        rows, columns = scheme["weight_block_size"]
        weight = parts["weight"].float()
        scales = parts["weight_scale_inv"].float()
        scales = scales.repeat_interleave(rows, 0)[: weight.shape[0]]
        return weight * scales.repeat_interleave(columns, 1)[:, : weight.shape[1]]
    if method == "gptq":
        codes = _words(parts["qweight"].t())
        return (codes - 8) * _spread(parts["scales"].t(), codes)
    if method == "awq":
        codes, zeros = (_words(parts[name], AWQ_PLACES).t() for name in ("qweight", "qzeros"))
        return (codes - _spread(zeros, codes)) * _spread(parts["scales"].t(), codes)
    if parts["weight_scale"].dtype == torch.uint8 and "weight" in parts:
        exponents = parts["weight_scale"].float() - MX_BIAS
        return parts["weight"].float() * _spread(torch.exp2(exponents), parts["weight"])
    packed = parts["weight"] if "weight_scale_2" in parts else parts.get("weight_packed")
    if packed is None:
        return parts["weight"].float() * parts["weight_scale"]
    if packed.dtype == torch.uint8:
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).int()
        values = torch.tensor((*FP4, *(-value for value in FP4)))[codes]
        if "weight_global_scale" in parts:
            return values * _spread(parts["weight_scale"], codes) / parts["weight_global_scale"]
        if "weight_scale_2" in parts:
            return values * _spread(parts["weight_scale"], codes) * parts["weight_scale_2"]
        exponents = parts["weight_scale"].float() - MX_BIAS
        return values * _spread(torch.exp2(exponents), codes)
    (group,) = scheme["config_groups"].values()
    bits = group["weights"]["num_bits"]
    codes = _words(packed, bits=bits)
    zeros = torch.full((1, 1), float(1 << bits - 1))
    if "weight_zero_point" in parts:
        zeros = _spread(_words(parts["weight_zero_point"].t()).t(), codes)
    return (codes - zeros) * _spread(parts["weight_scale"], codes)


def _words(
    words: torch.Tensor, places: tuple[int, ...] | None = None, *, bits: int = 4
) -> torch.Tensor:
    """Codes of int32 words, along the last dimension."""
    unsigned = words.to(torch.int64) & 0xFFFFFFFF
    each = [unsigned >> bits * place & (1 << bits) - 1 for place in places or range(32 // bits)]
    return torch.stack(each, dim=-1).flatten(-2).float()


def _spread(of_groups: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """One value for each weight, as vLLM loads scales for a model in bf16."""
    group = codes.shape[1] // of_groups.shape[1]
    return of_groups.to(torch.bfloat16).float().repeat_interleave(group, 1)

"""vLLM's choice of kernels for the linear layers of quantised checkpoints on a CPU rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray_hetero.compat.patching import original, replace

if TYPE_CHECKING:
    from torch import nn
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
        FP8BlockParams,
        Fp8BlockScaledMMLinearKernel,
    )

OPERATORS = {"_POSSIBLE_KERNELS": "cpu_gemm_wna16"}
"""Operator that vLLM's own kernel of a list calls, where a build for a processor may lack it; that
kernel does not look for it before its first step (CPUWNA16LinearKernel)."""


def offer_kernels(kernels: Mapping[str, type], *, is_first: bool) -> None:
    """Add kernels to those of which vLLM chooses for linear layers on CPUs.

    Replaces: the lists `_POSSIBLE_…_KERNELS` of vllm.model_executor.kernels.linear, on CPU ranks.
    Why: `register_linear_kernel` puts a kernel behind those of vLLM, and knows no list of those for
    FP8 in blocks, nor for FP8 weights alone.
    Can go when: kernels of all lists can be registered, with an order.

    Args:
        kernels: the name of vLLM's list → a kernel for it.
        is_first: whether they are chosen before vLLM's own, or where vLLM has none that could run
            on this processor.

    """
    # What torch.ops._C has is loaded with this module.
    from vllm import _custom_ops
    from vllm.model_executor.kernels import linear
    from vllm.platforms.interface import PlatformEnum

    for name, kernel in kernels.items():
        lists: dict[Any, list[type]] = original(linear, name)
        others = [one for one in lists.get(PlatformEnum.CPU, []) if one is not kernel]
        operator = OPERATORS.get(name)
        lacks = operator is not None and not hasattr(_custom_ops.torch.ops._C, operator)
        lists[PlatformEnum.CPU] = [kernel, *others] if is_first or lacks else [*others, kernel]


def block_parameters(kernel: Fp8BlockScaledMMLinearKernel, layer: nn.Module) -> FP8BlockParams:
    """The weight and the scales of blocks of a layer, and the names that they have there.

    Uses: `Fp8BlockScaledMMLinearKernel._get_layer_params`.
    """
    return original(kernel, "_get_layer_params")(layer)


def is_read_by_attention(layer: nn.Module) -> bool:
    """Whether latent attention reads a layer's tensors itself, so that they must stay plain.

    Uses: `_cpu_skip_gemm_dispatch`, which `MLAAttention` sets on such a layer and no other has.
    """
    return getattr(layer, "_cpu_skip_gemm_dispatch", False)


def keep_scales_of_parts() -> None:
    """Give the kernels layers in FP8 with one scale for each fused part as the checkpoint has them.

    Replaces: `w8a8_utils.requantize_with_max_scale`, on CPU ranks.
    Why: vLLM rounds the parts anew to one scale, with an operator that it has no CPU form of
    (`_C.static_scaled_fp8_quant`), so that such a checkpoint does not load there.  The kernels take
    a scale for each output, which leaves the weights as they are.
    Can go when: vLLM's CPU build has that operator, or hands the scales of parts to kernels.

    """
    import torch
    from vllm.model_executor.layers.quantization.utils import w8a8_utils

    def make(stock: Any) -> Any:
        def kept(weight: Any, weight_scale: Any, logical_widths: Any) -> Any:
            # A part without a scale of its own keeps what vLLM begins with.
            if weight_scale.ndim == 0 or weight_scale[-1] <= torch.finfo(weight.dtype).min:
                return stock(weight, weight_scale, logical_widths)
            return w8a8_utils.convert_to_channelwise(weight_scale, logical_widths), weight

        return kept

    replace(w8a8_utils, "requantize_with_max_scale", make)

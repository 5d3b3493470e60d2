"""Linear layers of quantised checkpoints, for vLLM to choose as it chooses its own kernels.

vLLM asks a list of kernels which of them can compute a layer, loads the checkpoint's tensors, and
hands them to the chosen one.  The classes here bring them into a format of kernels/formats/ and
compute with the streaming operator.  Activations stay bf16: what a checkpoint says about
quantising these saves nothing where reading the weights is what takes the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearKernel
from vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel import (
    Mxfp8LinearKernel,
    Mxfp8LinearLayerConfig,
)
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.quantization.utils.w8a8_utils import convert_to_channelwise
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

from ray_hetero.compat.models.quantised_kernels import block_parameters, is_read_by_attention
from ray_hetero.kernels.formats.base import BLOCK
from ray_hetero.kernels.formats.fp4 import Fp4Weight
from ray_hetero.kernels.formats.fp8 import Fp8Weight
from ray_hetero.kernels.formats.integers import Int4Weight, Int8Weight
from ray_hetero.kernels.formats.scaled import GROUP_MULTIPLE, Codes, ScaledWeight
from ray_hetero.kernels.formats.stored_codes import (
    MX_GROUP,
    block_floats,
    micro_floats,
    nano_floats,
    row_floats,
    unpacked,
)

Hold = Callable[[nn.Module, type[ScaledWeight], Codes], torch.Tensor]
"""Given a layer whose tensors are loaded and what they say, gives `HostWeight.data`."""
Answer = tuple[bool, str | None]
"""Whether a layer can be computed, and why not."""

INTEGERS: dict[Any, type[ScaledWeight]] = {
    scalar_types.uint4b8: Int4Weight,
    scalar_types.uint4: Int4Weight,
    scalar_types.uint8b128: Int8Weight,
    scalar_types.uint8: Int8Weight,
}
"""vLLM's types with a zero point in the middle of the codes, or with stored ones."""
_hold: list[Hold] = []
"""Receiver of the kernels' weights in this process, the last one set; vLLM makes the kernels."""


def use_holder(hold: Hold) -> None:
    """Set the receiver of the kernels' weights from now on."""
    _hold[:] = [hold]


def _computes(outputs: int, inputs: int, *types: torch.dtype | None) -> Answer:
    if not current_platform.is_cpu():
        return False, "it computes on CPUs"
    if any(kind not in (torch.bfloat16, None) for kind in types):
        return False, f"expected bfloat16 activations (--dtype bfloat16), got {types[0]}"
    if outputs % BLOCK or inputs % BLOCK:
        return False, f"expected sizes in multiples of {BLOCK}, got {outputs} and {inputs}"
    return True, None


def _has_sizes(group: int) -> Answer:
    if group != -1 and (group <= 0 or group % GROUP_MULTIPLE):
        return False, f"expected groups in multiples of {GROUP_MULTIPLE}, got {group}"
    return True, None


def _replace(layer: nn.Module, name: str, kind: type[ScaledWeight], codes: Codes) -> None:
    """Put what the operator reads in the place of a parameter."""
    bias = getattr(layer, "bias", None)
    if bias is not None:
        bias.data = bias.data.to(torch.float32)
    data = _hold[0](layer, kind, codes)
    setattr(layer, name, nn.Parameter(data, requires_grad=False))


def _forget(layer: nn.Module, *names: str | None) -> None:
    """Give up the memory of what is in the weight now."""
    for name in names:
        if name is not None and getattr(layer, name, None) is not None:
            setattr(layer, name, nn.Parameter(torch.empty(0), requires_grad=False))


def _multiply(x: torch.Tensor, data: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y: torch.Tensor = torch.ops.ray_hetero.streaming_linear(x, data, bias)
    return y


class StreamedIntegers(MPLinearKernel):  # type: ignore[misc]
    """Integers of four or eight bits in groups or by output: compressed-tensors, GPTQ, AWQ."""

    @classmethod
    def get_min_capability(cls) -> int:
        """None is asked for."""
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> Answer:
        """Whether a layer can be computed."""
        inputs, outputs = c.partition_weight_shape
        if c.weight_type not in INTEGERS:
            return False, f"expected {', '.join(map(str, INTEGERS))}, got {c.weight_type}"
        can, reason = _computes(outputs, inputs, c.act_type)
        return _has_sizes(c.group_size) if can else (can, reason)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Take the checkpoint's integers, scales and zero points."""
        inputs, outputs = self.config.partition_weight_shape
        kind = INTEGERS[self.config.weight_type]
        words, scales = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        by_output = words.data if words.input_dim == 1 else words.data.t()
        codes = unpacked(by_output, kind.bits)
        group = inputs if self.config.group_size == -1 else self.config.group_size
        of_groups = scales.data if scales.output_dim == 0 else scales.data.t()
        zeros = None
        if self.config.zero_points:
            stored = getattr(layer, str(self.w_zp_name))
            by_group = stored.data.t() if stored.output_dim == 0 else stored.data
            zeros = unpacked(by_group, kind.bits).t()
        assert codes.shape == (outputs, inputs)
        _replace(layer, self.w_q_name, kind, Codes(codes, of_groups, group, zeros))
        _forget(layer, self.w_s_name, self.w_zp_name)

    def apply_weights(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """y = x · Wᵀ + bias."""
        return _multiply(x, getattr(layer, self.w_q_name), bias)


class _OnCpus:
    """Kernels of floats, whichever class of vLLM's they are of."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Whether this process can use it."""
        return current_platform.is_cpu(), "it computes on CPUs"

    def apply_weights(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """y = x · Wᵀ + bias."""
        return _multiply(x, layer.weight, bias)


class _FourBitsOnCpus(_OnCpus):
    """Kernels of floats of four bits."""

    @classmethod
    def can_implement(cls, config: Any) -> Answer:
        """Any layer; its sizes are only known when it is loaded."""
        return True, None


@dataclass(frozen=True, eq=False)
class BlockFloats:
    """A checkpoint's floats of eight bits with scales for blocks."""

    weight: torch.Tensor
    """[N, K], E4M3."""
    scales: torch.Tensor
    """[N / rows, K / columns], rounded up."""
    rows: int
    """Rows of a block."""
    columns: int

    @property
    def codes(self) -> Codes:
        """Codes that a format stores."""
        return block_floats(self.weight, self.scales, (self.rows, self.columns))


class StreamedBlockFloats(_OnCpus, Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
    """Floats of eight bits with scales for blocks.

    Multi-head latent attention reads the tensors of one layer itself (kv_b_proj).  Decode steps
    are given the checkpoint's, which `checkpoint_blocks` of the layer keeps for latent_heads.py;
    vLLM finds what they say in bf16, with scales of one.  Of floats of eight bits its backend for
    AMX would make others with one scale for all, which rounds each of them a second time.
    """

    apply_input_quant = False

    @classmethod
    def can_implement(cls, config: FP8ScaledMMLinearLayerConfig) -> Answer:
        """Whether a layer can be computed."""
        shape = config.weight_quant_key.scale.group_shape
        can, reason = _computes(*config.weight_shape, config.input_dtype, config.out_dtype)
        return _has_sizes(shape.col) if can else (can, reason)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Take the checkpoint's floats and scales."""
        params = block_parameters(self, layer)
        shape = self.weight_group_shape
        blocks = BlockFloats(
            params.weight.data, params.block_scale.data, shape.row, shape.col
        )  # fmt: skip
        if is_read_by_attention(layer):
            layer.checkpoint_blocks = blocks
            plain, ones = Fp8Weight.expanded(blocks.codes), torch.ones(blocks.scales.shape)
            for name, values in ((params.WEIGHT, plain), (params.block_scale_attr, ones)):
                setattr(layer, name, nn.Parameter(values, requires_grad=False))
            return
        _replace(layer, params.WEIGHT, Fp8Weight, blocks.codes)
        _forget(layer, params.block_scale_attr)

    def apply_weights(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        """y = x · Wᵀ + bias."""
        if is_read_by_attention(layer):
            return nn.functional.linear(x, layer.weight, bias)
        return _multiply(x, layer.weight, bias)

    def apply_block_scaled_mm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Never called, as activations are not quantised."""
        raise NotImplementedError


class StreamedFloats(_OnCpus, FP8ScaledMMLinearKernel):  # type: ignore[misc]
    """Floats of eight bits with scales for outputs, or for all."""

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> Answer:
        """Whether a layer can be computed."""
        return _computes(*c.weight_shape, c.input_dtype, c.out_dtype)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Take the checkpoint's floats and scales."""
        name, scale_name, *_ = self.layer_param_names
        shape = self.config.weight_quant_key.scale.group_shape
        if shape.row > 1 and shape.col > 1:
            scale_name = "weight_scale_inv"
            weight, scales = layer.weight.data, layer.weight_scale_inv.data
            codes = block_floats(weight, scales, shape)
        else:
            # It is [K, N] by now.
            codes = row_floats(getattr(layer, name).data.t(), getattr(layer, scale_name).data)
        _replace(layer, name, Fp8Weight, codes)
        _forget(layer, scale_name)

    def apply_scaled_mm(self, **_: Any) -> torch.Tensor:
        """Never called, as activations are not quantised."""
        raise NotImplementedError


class StreamedBytes(CPUInt8ScaledMMLinearKernel):  # type: ignore[misc]
    """The weights of W8A8: integers of eight bits with scales for outputs, or for all."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Take the checkpoint's integers and scales; vLLM's kernel takes what does not suit."""
        name, scale_name, *_ = self.layer_param_names
        weight, scales = getattr(layer, name).data, getattr(layer, scale_name).data
        can, _reason = _computes(*weight.shape, torch.get_default_dtype())
        if not can:
            super().process_weights_after_loading(layer)
            return
        if not self.config.is_channelwise:
            scales = convert_to_channelwise(scales, layer.logical_widths)
        codes = weight.contiguous().view(torch.uint8) ^ Int8Weight.zero()
        of_rows = scales.reshape(-1, 1).float()
        _replace(layer, name, Int8Weight, Codes(codes, of_rows, weight.shape[1]))
        _forget(layer, scale_name)
        self.linear_method = self._apply_weights_streamed

    def _apply_weights_streamed(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return _multiply(x, getattr(layer, self.layer_param_names[0]), bias)


class StreamedMxFloats(_FourBitsOnCpus, MxFp4LinearKernel):  # type: ignore[misc]
    """MXFP4."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Take the checkpoint's floats and scales."""
        codes = micro_floats(layer.weight.data, layer.weight_scale.data)
        _replace(layer, "weight", Fp4Weight, codes)
        _forget(layer, "weight_scale")


class StreamedNvFloats(_FourBitsOnCpus, NvFp4LinearKernel):  # type: ignore[misc]
    """NVFP4."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Take the checkpoint's floats and scales."""
        codes = nano_floats(
            layer.weight.data, layer.weight_scale.data, float(layer.weight_global_scale)
        )
        _replace(layer, "weight", Fp4Weight, codes)
        _forget(layer, "weight_scale")


class StreamedMxBytes(_OnCpus, Mxfp8LinearKernel):  # type: ignore[misc]
    """MXFP8."""

    @classmethod
    def can_implement(cls, c: Mxfp8LinearLayerConfig) -> Answer:
        """Whether a layer can be computed."""
        return _computes(*c.weight_shape)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Take the checkpoint's floats and scales."""
        codes = block_floats(layer.weight.data, layer.weight_scale.data, (1, MX_GROUP))
        _replace(layer, "weight", Fp8Weight, codes)
        _forget(layer, "weight_scale")


KERNELS: dict[str, type] = {
    "_POSSIBLE_KERNELS": StreamedIntegers,
    "_POSSIBLE_FP8_BLOCK_KERNELS": StreamedBlockFloats,
    "_POSSIBLE_FP8_KERNELS": StreamedFloats,
    "_POSSIBLE_WFP8A16_KERNELS": StreamedFloats,
    "_POSSIBLE_INT8_KERNELS": StreamedBytes,
    "_POSSIBLE_MXFP4_KERNELS": StreamedMxFloats,
    "_POSSIBLE_NVFP4_KERNELS": StreamedNvFloats,
    "_POSSIBLE_MXFP8_KERNELS": StreamedMxBytes,
}
"""Kernels by the list of vLLM's that each belongs to."""

"""vLLM's routed experts of quantised checkpoints on a CPU rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray_hetero.compat.models.cpu_experts import computing, support_activations
from ray_hetero.compat.models.routed_experts import experts_of, routed_layers, without_memory
from ray_hetero.compat.patching import original, replace
from ray_hetero.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

INTEGERS = {
    "CompressedTensorsWNA16MoEMethod": (
        "compressed-tensors", "weight_packed", "weight_scale", "weight_zero_point",
    ),
    "AutoGPTQMoEMethod": ("gptq", "qweight", "scales", "qzeros"),
    "AutoAWQMoEMethod": ("awq", "qweight", "scales", "qzeros"),
}  # fmt: skip
"""vLLM's method → how integers are packed, and the ends of their tensors' names."""
CLASSES = ("CPUExpertsFp8", "CPUExpertsInt4", "CPUExpertsInt8", "CPUExpertsMxfp4")
"""vLLM's experts whose weights a checkpoint holds as codes, in `experts.cpu_moe`."""


@dataclass(frozen=True)
class StoredExperts:
    """The tensors of a layer of experts as its checkpoint holds them."""

    scheme: str
    """fp8, int4, int8, mxfp4 or nvfp4."""
    w13: torch.Tensor
    """[E, 2 · inner, …]: gate and up."""
    w2: torch.Tensor
    """[E, hidden, …]: down."""
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor
    w13_zero: torch.Tensor | None = None
    w2_zero: torch.Tensor | None = None
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale, the last ones may be fewer; None where the tensors'
    shapes say it."""
    w13_factor: torch.Tensor | None = None
    """[E], float32: factor of all scales of an expert, of NVFP4."""
    w2_factor: torch.Tensor | None = None
    layout: str = "compressed-tensors"
    """Packing of integers of four bits, by who packs them so: compressed-tensors, gptq or awq."""


def use_quantised_experts(kernel: Callable[..., None], activations: Collection[str]) -> None:
    """Compute a CPU rank's routed experts of quantised checkpoints with another kernel.

    Replaces: `CPUExpertsFp8._supports_current_device`, `CPUExpertsFp8._supports_quant_scheme`,
    `CPUExpertsFp8._supports_routing_method`, `CPUExpertsFp8._supports_activation`,
    `CPUExpertsFp8._supports_no_act_and_mul`, `CPUExpertsFp8.apply`, the same six of
    `CPUExpertsInt4`, of `CPUExpertsInt8` and of `CPUExpertsMxfp4`;
    `CPUExpertsInt8.process_weights_after_loading`; `cpu_moe.prepare_fp8_moe_layer_for_cpu`,
    `cpu_moe.prepare_mxfp4_moe_layer_for_cpu`, `int_wna16._process_weights_cpu`.
    Why: vLLM's kernels for them need AMX, and its choice knows its own kernels only.  It leaves out
    routers such as those of Kimi K2 and GLM-4.5 (sigmoids with a bias, without groups), though
    these classes are given the experts that were chosen, whoever has chosen them.
    Can go when: kernels of experts can be registered, as quantisation methods can.

    Args:
        kernel: see `cpu_experts.use_experts`; called for experts that were given a number.
        activations: values of vLLM's MoEActivation that the kernel computes.

    """
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.oracle import int_wna16
    from vllm.platforms import current_platform

    def anywhere(_stock: Any) -> Any:
        return staticmethod(lambda: bool(current_platform.is_cpu()))

    def any_of_its_type(stock: Any) -> Any:
        def supports(weight_key: Any, activation_key: Any) -> bool:
            return stock(weight_key, activation_key) or is_known(weight_key)

        return staticmethod(supports)

    def by_any_router(_stock: Any) -> Any:
        return staticmethod(lambda _method, _weight_key, _activation_key: True)

    for name in CLASSES:
        experts = original(cpu_moe, name)
        replace(experts, "_supports_current_device", anywhere)
        replace(experts, "_supports_quant_scheme", any_of_its_type)
        replace(experts, "_supports_routing_method", by_any_router)
        support_activations(experts, activations)
        replace(experts, "apply", computing(kernel))
    # What a checkpoint holds is still wanted when the model is loaded.
    replace(cpu_moe, "prepare_fp8_moe_layer_for_cpu", lambda _stock: lambda w13, w2: (w13, w2))
    replace(cpu_moe, "prepare_mxfp4_moe_layer_for_cpu", lambda _stock: lambda *tensors: tensors)
    int8 = original(cpu_moe, "CPUExpertsInt8")
    replace(int8, "process_weights_after_loading", lambda _stock: lambda _self, _layer: None)
    replace(int_wna16, "_process_weights_cpu", lambda _stock: lambda *_args: None)
    _choose_for_four_bits(kernel, activations)
    _choose_for_mx()


@functools.cache
def nvfp4_experts() -> Any:
    """The class that stands for experts in NVFP4, of which vLLM has none for CPUs."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    return type("CPUExpertsNvfp4", (original(cpu_moe, "CPUExpertsMxfp4"),), {})


def _choose_for_four_bits(kernel: Callable[..., None], activations: Collection[str]) -> None:
    """Compute experts in NVFP4 on a CPU rank, in ModelOpt's and compressed-tensors' layout.

    Replaces: `modelopt.select_nvfp4_moe_backend`, `modelopt.convert_to_nvfp4_moe_kernel_format`,
    the same two of `compressed_tensors_moe_w4a4_nvfp4`.
    Uses: `NvFp4MoeBackend.EMULATION`.
    Why: vLLM has kernels for them on GPUs only, and raises when a layer is made.
    Can go when: vLLM chooses among kernels for CPUs too.
    """
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4,
    )

    experts = nvfp4_experts()
    replace(experts, "apply", computing(kernel))
    support_activations(experts, activations)
    chosen = original(NvFp4MoeBackend, "EMULATION"), experts

    def kept(
        nvfp4_backend: Any, layer: Any, w13: Any, w13_scale: Any, w13_scale_2: Any, a13_scale: Any,
        w2: Any, w2_scale: Any, w2_scale_2: Any, a2_scale: Any, **_: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        # The activations' factors are of no use here, where activations are not quantised.
        return w13, w13_scale, w13_scale_2, a13_scale, w2, w2_scale, w2_scale_2, a2_scale

    for module in (modelopt, compressed_tensors_moe_w4a4_nvfp4):
        replace(module, "select_nvfp4_moe_backend", lambda _stock: lambda *_, **_how: chosen)
        replace(module, "convert_to_nvfp4_moe_kernel_format", lambda _stock: kept)


def _choose_for_mx() -> None:
    """Compute experts in MXFP8 as experts in FP8 with blocks of 1 × 32.

    Replaces: `modelopt.select_mxfp8_moe_backend`,
    `compressed_tensors_moe_w8a8_mxfp8.select_mxfp8_moe_backend`.
    Uses: `Fp8MoeBackend.CPU`.
    Why: vLLM has kernels for them on GPUs only, and raises when a layer is made.
    Can go when: vLLM chooses among kernels for CPUs too.
    """
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_mxfp8,
    )

    chosen = original(Fp8MoeBackend, "CPU"), original(cpu_moe, "CPUExpertsFp8")
    for module in (modelopt, compressed_tensors_moe_w8a8_mxfp8):
        replace(module, "select_mxfp8_moe_backend", lambda _stock: lambda *_, **_how: chosen)


def is_known(key: Any) -> bool:
    """Whether weights of a type are floats of eight bits or integers of four, whatever shares a
    scale: vLLM's own kernels know one size of groups."""
    import torch
    from vllm.scalar_type import scalar_types

    known = (torch.float8_e4m3fn, scalar_types.uint4b8, scalar_types.uint4)
    return key is not None and key.dtype in known


def quantised_layers(model: Any) -> Iterator[tuple[Any, Any, StoredExperts]]:
    """Layers whose experts are computed by one of `CLASSES`.

    Uses: the names under which the methods in `INTEGERS` and those of floats register a
    checkpoint's tensors.

    Yields:
        The layer, its experts object, and its tensors.

    Raises:
        UnsupportedError: integers that are packed in a way that nothing here reads.

    """
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    classes = (*(original(cpu_moe, name) for name in CLASSES), nvfp4_experts())
    for layer in routed_layers(model):
        experts = experts_of(layer)
        if isinstance(experts, classes):
            yield layer, experts, _stored(layer, type(experts).__name__)


def _stored(layer: Any, name: str) -> StoredExperts:
    if name == "CPUExpertsInt4":
        return _stored_integers(layer)
    end = "weight_scale_inv" if hasattr(layer, "w13_weight_scale_inv") else "weight_scale"
    w13_scale, w2_scale = (getattr(layer, f"{part}_{end}").data for part in ("w13", "w2"))
    scheme = name.removeprefix("CPUExperts").lower()
    block = getattr(layer, "weight_block_size", None) if scheme == "fp8" else None
    factors = [
        getattr(layer, f"{part}_weight_scale_2").data if scheme == "nvfp4" else None
        for part in ("w13", "w2")
    ]
    return StoredExperts(
        scheme,
        layer.w13_weight.data,
        layer.w2_weight.data,
        w13_scale,
        w2_scale,
        block=None if block is None else (block[0], block[1]),
        w13_factor=factors[0],
        w2_factor=factors[1],
    )


def _stored_integers(layer: Any) -> StoredExperts:
    method = type(layer.quant_method).__name__
    names = INTEGERS.get(method)
    config = getattr(layer.quant_method, "quant_config", None)
    if names is None or getattr(config, "desc_act", False):
        reordered = "with act-order " if names is not None else ""
        raise UnsupportedError(
            f"{layer.layer_name}: its experts are 4-bit integers {reordered}({method}), for which "
            "CPU ranks have no kernel. Write a layout without CPU ranks."
        )
    layout, weight, scale, zero = names
    is_symmetric = layout == "gptq" and getattr(config, "is_sym", True)
    return StoredExperts(
        "int4",
        getattr(layer, f"w13_{weight}").data,
        getattr(layer, f"w2_{weight}").data,
        getattr(layer, f"w13_{scale}").data,
        getattr(layer, f"w2_{scale}").data,
        None if is_symmetric else _data(layer, f"w13_{zero}"),
        None if is_symmetric else _data(layer, f"w2_{zero}"),
        _groups(layer.quant_method),
        layout=layout,
    )


def _groups(method: Any) -> tuple[int, int] | None:
    """Block of integers in groups; None where all inputs share a scale."""
    config = getattr(method, "quant_config", None)
    group = getattr(method, "group_size", None) or getattr(config, "group_size", None)
    return (1, group) if isinstance(group, int) and group > 0 else None


def _data(layer: Any, name: str) -> torch.Tensor | None:
    found = getattr(layer, name, None)
    return None if found is None else found.data


def forget_tensors(layer: Any) -> None:
    """Give up the memory of a layer's tensors, which keep their shapes for whoever asks."""
    for name, parameter in list(layer.named_parameters(recurse=False)):
        if name.startswith(("w13_", "w2_")):
            setattr(layer, name, without_memory(parameter.data))
    for part in ("w13", "w2"):
        for name in ("weight_packed", "qweight"):
            if not hasattr(layer, f"{part}_weight") and hasattr(layer, f"{part}_{name}"):
                setattr(layer, f"{part}_weight", getattr(layer, f"{part}_{name}"))

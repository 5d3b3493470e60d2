"""The layers of routed experts that a CPU rank's own kernel computes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from vllm.utils.torch_utils import direct_register_custom_op

from placement.units import GIB
from ray_hetero.compat import cpu_experts, quantised_experts
from ray_hetero.compat.routed_experts import number_of
from ray_hetero.config import CpuConfig
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.experts.expert_room import MakeRoom, Room
from ray_hetero.kernels.experts.quantised_experts import held
from ray_hetero.kernels.experts.routed_experts import MULTIPLE, SILU, SWIGLU_OAI, RoutedExperts
from ray_hetero.kernels.formats import FORMATS
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.log import logger

ACTIVATIONS = {"silu": SILU, "swigluoai": SWIGLU_OAI}
"""Activations by the value of vLLM's MoEActivation; gpt-oss has gate and up in turns."""

_library = torch.library.Library("ray_hetero", "FRAGMENT")
_layers: list[RoutedExperts] = []
"""Layers of the model of this process, by their number."""


def _routed_experts(
    out: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor | None,
    ids: torch.Tensor,
    layer: int,
) -> None:
    _layers[layer](x, weights, ids, out)


def _writes_only(
    out: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor | None,
    ids: torch.Tensor,
    layer: int,
) -> None:
    """Nothing to say of shapes: `out` is given."""


direct_register_custom_op(
    "routed_experts",
    _routed_experts,
    mutates_args=["out"],
    fake_impl=_writes_only,
    target_lib=_library,
    dispatch_key="CPU",
)


class ExpertLayers:
    """The layers of routed experts of this process.

    Args:
        config: which format weights are to be held in.
        kernel: what computes linear layers, whose level experts are computed at.
        room: makes the memory of each layer's weights.

    """

    def __init__(self, config: CpuConfig, kernel: StreamingLinear, room: MakeRoom = Room) -> None:
        self._room = room
        self._kind = FORMATS[config.weight_format(kernel.level.name)]
        self._kernel = kernel
        self._bytes = self._bytes_before = 0
        _layers.clear()
        cpu_experts.use_experts(torch.ops.ray_hetero.routed_experts, self._take)
        quantised_experts.use_quantised_experts(torch.ops.ray_hetero.routed_experts)

    def _take(self, layer: Any) -> int | None:
        """Hold a layer's experts; its number, or None if they stay vLLM's."""
        if why := unsuited(layer):
            logger.info("experts stay with vLLM's kernel: %s (%s)", why, type(layer).__name__)
            return None
        experts = RoutedExperts(
            layer.w13_weight.data,
            layer.w2_weight.data,
            getattr(layer, "w13_bias", None),
            getattr(layer, "w2_bias", None),
            native=self._kernel.native,
            level=self._kernel.level,
            kind=self._kind,
            activation=ACTIVATIONS[layer.activation.value],
            is_interleaved=layer.activation.value == "swigluoai",
            room=self._room,
        )
        self._bytes_before += layer.w13_weight.nbytes + layer.w2_weight.nbytes
        return self._add(experts)

    def _add(self, experts: RoutedExperts) -> int:
        self._bytes += experts.nbytes
        _layers.append(experts)
        return len(_layers) - 1

    def _take_quantised(self, model: torch.nn.Module) -> Counter[str]:
        """Hold the experts of quantised checkpoints; how many layers of each scheme there are."""
        taken: Counter[str] = Counter()
        for layer, experts, stored in quantised_experts.quantised_layers(model):
            if why := unsuited_activation(layer):
                raise UnsupportedError(
                    f"{layer.layer_name}: its experts are in {stored.scheme}, and {why}; CPU "
                    "ranks have no kernel for them. Write a layout without CPU ranks."
                )
            is_interleaved = layer.activation.value == "swigluoai"
            made = RoutedExperts.of_weights(
                held(stored, self._kernel.native, is_interleaved=is_interleaved),
                len(stored.w13),
                getattr(layer, "w13_bias", None),
                getattr(layer, "w2_bias", None),
                native=self._kernel.native,
                level=self._kernel.level,
                activation=ACTIVATIONS[layer.activation.value],
                is_interleaved=is_interleaved,
                room=self._room,
            )
            self._bytes_before += stored.w13.nbytes + stored.w2.nbytes
            experts.layer_number = self._add(made)
            quantised_experts.forget_tensors(layer)
            taken[stored.scheme] += 1
        return taken

    def loaded(self, model: torch.nn.Module) -> str:
        """Say what was taken and what was not, now that all weights are there.

        Returns:
            What the model's code depends on besides its configuration.

        """
        for scheme, count in sorted(self._take_quantised(model).items()):
            logger.info("experts of %d layers are the checkpoint's own %s", count, scheme)
        if _layers:
            logger.info(
                "experts of %d layers stream their weights, %.1f GiB instead of %.1f GiB "
                "(cpu.linear_kernel)",
                len(_layers),
                self._bytes / GIB,
                self._bytes_before / GIB,
            )
        for name, count in cpu_experts.other_methods(model).items():
            logger.info("experts of %d layers stay with vLLM's kernel for %s", count, name)
        return f"{len(_layers)} experts"


def held_by(layer: Any) -> RoutedExperts | None:
    """The experts of a layer of vLLM's; None where they stay with vLLM's kernel.

    A token's weights are applied to results, so a layer that applies them to tokens has none.
    """
    number = number_of(layer)
    if number is None or layer.apply_router_weight_on_input:
        return None
    return _layers[number]


def unsuited(layer: Any) -> str:
    """Why a layer of vLLM's, whose experts are not quantised, cannot be computed here; or ""."""
    dtype, hidden = layer.w13_weight.dtype, layer.w2_weight.shape[1]
    if dtype != torch.bfloat16:
        return f"weights are {dtype}, expected torch.bfloat16"
    if hidden % MULTIPLE:
        return f"the hidden size is {hidden}, expected a multiple of {MULTIPLE}"
    return unsuited_activation(layer)


def unsuited_activation(layer: Any) -> str:
    """Why the activation of a layer's experts cannot be computed here; or ""."""
    if not layer.moe_config.is_act_and_mul or layer.activation.value not in ACTIVATIONS:
        return (
            f"the activation is {layer.activation.value}, expected "
            f"{' or '.join(ACTIVATIONS)} of a gate"
        )
    if any(getattr(layer, f"swiglu_{name}") is not None for name in ("limit", "alpha", "beta")):
        return "the activation has limits of its own"
    return ""

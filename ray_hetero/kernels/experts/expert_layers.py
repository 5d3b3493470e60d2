"""The layers of routed experts that a CPU rank's own kernel computes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch

from placement.units import GIB
from ray_hetero.compat.models import cpu_experts, quantised_experts, routed_experts
from ray_hetero.compat.models.routed_experts import number_of
from ray_hetero.config import CpuConfig
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.custom_ops import register_op
from ray_hetero.kernels.experts.activations import FIXED, ROWS, Activation
from ray_hetero.kernels.experts.arranged_experts import arranged
from ray_hetero.kernels.experts.expert_matrices import ExpertMatrices
from ray_hetero.kernels.experts.expert_room import MakeRoom, Room
from ray_hetero.kernels.experts.experts_one_by_one import PlainExperts
from ray_hetero.kernels.experts.load_progress import LoadProgress
from ray_hetero.kernels.experts.quantised_experts import held
from ray_hetero.kernels.experts.routed_experts import MULTIPLE, RoutedExperts
from ray_hetero.kernels.formats import FORMATS
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.log import logger

_library = torch.library.Library("ray_hetero", "FRAGMENT")
_layers: list[RoutedExperts | PlainExperts] = []
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


register_op(_library, "routed_experts", _routed_experts, _writes_only, mutated=("out",))


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
        self._plain = 0
        cpu_experts.use_experts(torch.ops.ray_hetero.routed_experts, self._take, ROWS)
        quantised_experts.use_quantised_experts(torch.ops.ray_hetero.routed_experts, ROWS)

    def _take(self, layer: Any) -> int | None:
        """Hold a layer's experts; its number, or None if they stay vLLM's.

        Raises:
            UnsupportedError: nothing here computes their activation.

        """
        if why := unsuited_activation(layer):
            raise UnsupportedError(
                f"{layer.layer_name}: {why}; CPU ranks have no kernel for its experts. Write a "
                "layout without CPU ranks."
            )
        activation = activation_of(layer)
        if why := unsuited(layer):
            is_limited = activation.limit < math.inf and activation.value not in FIXED
            if not is_limited and cpu_experts.has_kernel(layer):
                logger.info("experts stay with vLLM's kernel: %s (%s)", why, type(layer).__name__)
                return None
            self._plain += 1
            _layers.append(PlainExperts(layer, activation))
            return len(_layers) - 1
        experts = RoutedExperts(
            ExpertMatrices(
                layer.w13_weight.data,
                layer.w2_weight.data,
                getattr(layer, "w13_bias", None),
                getattr(layer, "w2_bias", None),
            ),
            native=self._kernel.native,
            level=self._kernel.level,
            kind=self._kind,
            activation=activation,
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
        progress = LoadProgress(sum(1 for _ in routed_experts.routed_layers(model)))
        for layer, experts, stored in quantised_experts.quantised_layers(model):
            if why := unsuited_activation(layer):
                raise UnsupportedError(
                    f"{layer.layer_name}: its experts are in {stored.scheme}, and {why}; CPU "
                    "ranks have no kernel for them. Write a layout without CPU ranks."
                )
            activation = activation_of(layer)
            try:
                made = self._made(layer, stored, activation)
            except UnsupportedError as error:
                raise UnsupportedError(f"{layer.layer_name}, {error}") from None
            self._bytes_before += stored.w13.nbytes + stored.w2.nbytes
            experts.layer_number = self._add(made)
            quantised_experts.forget_tensors(layer)
            taken[stored.scheme] += 1
            progress.add(made.nbytes)
        return taken

    def _made(self, layer: Any, stored: Any, activation: Activation) -> RoutedExperts:
        """A layer's experts in the order of the kernel.

        Raises:
            UnsupportedError: a shape, a scale or a code that the kernels do not compute.

        """
        native = self._kernel.native
        biases = getattr(layer, "w13_bias", None), getattr(layer, "w2_bias", None)
        about = {"native": native, "level": self._kernel.level, "activation": activation}
        if found := arranged(stored, native, activation.order, self._room):
            return RoutedExperts.in_room(*found, *biases, **about)
        weights = held(stored, native, activation.order)
        return RoutedExperts.of_weights(weights, len(stored.w13), *biases, **about, room=self._room)

    def loaded(self, model: torch.nn.Module) -> str:
        """Say what was taken and what was not, now that all weights are there.

        Returns:
            What the model's code depends on besides its configuration.

        """
        for scheme, count in sorted(self._take_quantised(model).items()):
            logger.info("experts of %d layers are the checkpoint's own %s", count, scheme)
        if self._plain:
            logger.warning(
                "experts of %d layers are computed by PyTorch, one expert after the other, which "
                "takes several times as long: neither vLLM's kernels nor these take their "
                "activation in this type and size. Type --dtype bfloat16 for a hidden size in "
                "multiples of %d",
                self._plain,
                MULTIPLE,
            )
        if len(_layers) > self._plain:
            logger.info(
                "experts of %d layers stream their weights, %.1f GiB instead of %.1f GiB "
                "(cpu.linear_kernel)",
                len(_layers) - self._plain,
                self._bytes / GIB,
                self._bytes_before / GIB,
            )
        for name, count in cpu_experts.other_methods(model).items():
            logger.info("experts of %d layers stay with vLLM's kernel for %s", count, name)
        return f"{len(_layers)} experts"


def held_by(layer: Any) -> RoutedExperts | None:
    """The experts of a layer of vLLM's; None where something else computes them."""
    number = number_of(layer)
    held = None if number is None else _layers[number]
    return held if isinstance(held, RoutedExperts) else None


def unsuited(layer: Any) -> str:
    """Why this project's kernels cannot compute a layer that is not quantised; or ""."""
    dtype, hidden = layer.w13_weight.dtype, layer.w2_weight.shape[1]
    if dtype != torch.bfloat16:
        return f"weights are {dtype}, expected torch.bfloat16"
    if hidden % MULTIPLE:
        return f"the hidden size is {hidden}, expected a multiple of {MULTIPLE}"
    return ""


def unsuited_activation(layer: Any) -> str:
    """Why the activation of a layer's experts cannot be computed here; or ""."""
    said = routed_experts.activation_of(layer)
    row = ROWS.get(said.value)
    if row is None:
        return f"the activation is {said.value}, expected one of {', '.join(ROWS)}"
    if said.limit is not None and not row.has_limit:
        return f"the activation is {said.value} with a limit of {said.limit}, expected none"
    if said.value == "swigluoai_uninterleave" and said.limit is None:
        return f"the activation is {said.value} without a limit"
    if said.value == "situ" and not said.situ_limit:
        return f"the activation is {said.value} without its beta"
    fixed = FIXED.get(said.value)
    if fixed is not None and said.limit not in (None, fixed.limit):
        return f"the limit of {said.value} is {said.limit}, expected {fixed.limit}"
    return ""


def activation_of(layer: Any) -> Activation:
    """The activation of a layer of which `unsuited_activation` says nothing."""
    said = routed_experts.activation_of(layer)
    if said.value in FIXED:
        return FIXED[said.value]
    if said.value == "situ":
        return Activation(
            said.value, limit=said.situ_limit or math.inf, up_limit=said.situ_up_limit or math.inf
        )
    if not ROWS[said.value].has_limit:
        return Activation(said.value)
    limit = math.inf if said.limit is None else said.limit
    if said.value == "silu":
        return Activation(limit=limit, up_limit=limit)
    alpha, beta = 1.0 if said.alpha is None else said.alpha, said.beta or 0.0
    return Activation(said.value, alpha=alpha, beta=beta, limit=limit, up_limit=limit)

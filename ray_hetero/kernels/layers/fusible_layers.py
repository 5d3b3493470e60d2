"""The decoder layers of a model that can become one operator, once its weights are loaded.

A structure says what a layer's parts are (structures/); here each of them is looked at.  Layers
whose parts are all known here can take the place of vLLM's (layer_fusion.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from vllm.model_executor.layers.activation import (
    GELU,
    FastGELU,
    GeluAndMul,
    GELUTanh,
    NewGELU,
    ReLUSquaredActivation,
    SiluAndMul,
)

from ray_hetero.compat.models.compilation import is_compiled
from ray_hetero.compat.models.lora import base_layer
from ray_hetero.kernels.layers import attention
from ray_hetero.kernels.layers.adapters import Adapters, adapters_of
from ray_hetero.kernels.layers.attention import Attention, as_norm
from ray_hetero.kernels.layers.kinds import LayerOperator, operator_of
from ray_hetero.kernels.layers.layer import Layer
from ray_hetero.kernels.layers.layer_parts import (
    Activation,
    Linear,
    PostAttention,
    QkvInput,
    adapters_in,
)
from ray_hetero.kernels.layers.mamba2_mixers import FoundMixer, find_mixers
from ray_hetero.kernels.layers.structures import Calls, LayerModules, layers_attribute, structure_of
from ray_hetero.kernels.linear.rank_sums import RankSums, why_not_added
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear

PLAIN_ACTIVATIONS: dict[type, Activation] = {
    GELU: "gelu",
    GELUTanh: "gelu_tanh",
    NewGELU: "gelu_tanh",
    FastGELU: "gelu_tanh",
    nn.ReLU: "relu",
    ReLUSquaredActivation: "relu_squared",
    nn.SiLU: "silu",
}
"""Activations of MLPs without a gate, by class."""
Linears = Mapping[nn.Module, Linear]
"""Linear layers that the kernel computes, by vLLM's module."""


@dataclass(frozen=True, eq=False)
class Run:
    """Layers that follow one another and become one operator."""

    decoder: Any
    """vLLM's model that calls them."""
    attribute: str
    """Attribute of the model that holds its layers."""
    begin: int
    """Index of the run's first layer among the model's."""
    layers: list[Layer]

    @property
    def is_last(self) -> bool:
        """Whether the decoder has no layers of this stage behind them."""
        return bool(self.begin + len(self.layers) == self.decoder.end_layer)

    @property
    def is_whole(self) -> bool:
        """Whether these are all layers of this stage that the decoder has."""
        return self.is_last and bool(self.begin == self.decoder.start_layer)

    @property
    def adapters(self) -> Adapters | None:
        """Adapters of one of the layers, if they have some."""
        return adapters_in(
            one for layer in self.layers for one in (layer.input.qkv, *layer.parts.linears)
        )


@dataclass(frozen=True, eq=False)
class SingleLayer:
    """A layer that becomes an operator of its own."""

    layers: nn.ModuleList
    """List of vLLM's model that holds the layer."""
    place: int
    operator: LayerOperator


@dataclass(frozen=True, eq=False)
class Fusible:
    """Layers of a model that can be fused."""

    runs: list[Run]
    left: Counter[str]
    """Layers that cannot, by why."""
    callers: list[nn.Module]
    """Modules that vLLM compiles, of whose layers all can be fused: little is left to compile."""
    single: list[SingleLayer]
    """Layers of the kinds that are operators of their own."""
    mixers: list[FoundMixer]
    """Mixers of Mamba 2, in whichever layers."""
    mixers_left: Counter[str]
    """Mixers that cannot, by why."""

    @classmethod
    def none(cls) -> Fusible:
        """Result for a model in which nothing was looked for."""
        return cls([], Counter(), [], [], [], Counter())


def find(model: nn.Module, linears: Linears, kernel: StreamingLinear) -> Fusible:
    """Find the layers of a model that can be fused; arguments as of `fuse`."""
    runs: list[Run] = []
    left: Counter[str] = Counter()
    single: list[SingleLayer] = []
    whole: dict[nn.Module, bool] = {}
    for decoder in model.modules():
        name = layers_attribute(decoder)
        if name is None:
            continue
        layers = getattr(decoder, name)
        own = list(layers)[decoder.start_layer : decoder.end_layer]
        found: list[Layer | str] = []
        for place, layer in enumerate(own, decoder.start_layer):
            one = operator_of(decoder, layer, linears, kernel)
            if isinstance(one, LayerOperator):
                single.append(SingleLayer(layers, place, one))
                found.append("")
                continue
            found.append(layer_of(decoder, layer, linears, kernel) if one is None else one)
        left.update(
            f"{type(layer).__name__}: {why}"
            for layer, why in zip(own, found, strict=True)
            if isinstance(why, str) and why
        )
        # An MLP that stays vLLM's module is compiled with what is around it.
        whole[decoder] = all(isinstance(one, Layer) and one.mlp is None for one in found)
        runs += [
            Run(decoder, name, decoder.start_layer + first, some)
            for first, some in _following(found)
        ]
    mixers = find_mixers(model, linears, kernel)
    return Fusible(runs, left, _callers(model, whole), single, *mixers)


def _callers(model: nn.Module, whole: Mapping[nn.Module, bool]) -> list[nn.Module]:
    """Modules that vLLM compiles and that call decoders, all of which are one operator."""
    found = []
    for module in filter(is_compiled, model.modules()):
        # The decoder itself, or, as in OPT, a module around it.
        called = [whole[one] for one in module.modules() if one in whole]
        if called and all(called):
            found.append(module)
    return found


def _following(found: Sequence[Layer | str]) -> Iterator[tuple[int, list[Layer]]]:
    """Layers without another kind between them, with the place of the first.

    A layer whose MLP stays vLLM's module is alone.
    """
    some: list[Layer] = []
    for place, layer in enumerate([*found, ""]):
        is_alone = isinstance(layer, Layer) and layer.mlp is not None
        if some and (isinstance(layer, str) or is_alone or some[0].mlp is not None):
            yield place - len(some), some
            some = []
        if isinstance(layer, Layer):
            some.append(layer)


def layer_of(decoder: Any, layer: Any, linears: Linears, kernel: StreamingLinear) -> Layer | str:
    """The parts of a layer of a model, or why it is left to vLLM."""
    # Hidden states that are wanted from between layers would not be there any more.
    if getattr(decoder, "aux_hidden_state_layers", ()):
        return "a drafter reads hidden states between layers"
    known = structure_of(decoder, layer)
    if known is None:
        return f"layers of this kind in {type(decoder).__name__} are not among those that are known"
    structure, modules = known
    why = _why_unsuited(modules, linears) or _why_not_added(modules, kernel.sums)
    if why := why or attention.why_unsuited(modules):
        return why
    # vLLM adds to the residual and takes the norm in one operator where it hands both on.
    of_rounded = structure.calls not in {Calls.RESIDUAL, Calls.HIDDEN_FIRST}
    input_norm, norm, output_norm, down_norm = (
        None if one is None else as_norm(one, of_rounded=of_rounded) for one in modules.norms
    )
    assert input_norm is not None
    assert norm is not None
    if any(one is not None and one.weight.dtype != kernel.dtype
           for one in (input_norm, norm, output_norm, down_norm)):  # fmt: skip
        return "norms are of another type than the linear layers"
    found = [_linear(one, linears, kernel) for one in modules.linears]
    if left := [one for one in found if isinstance(one, str)]:
        return left[0]
    qkv, output, *mlp = (one for one in found if isinstance(one, Linear))
    is_first = kernel.sums is None or kernel.sums.is_first
    if not is_first:
        output = replace(output, bias=None)
    begins, attention_part = QkvInput(input_norm, qkv), Attention(modules, kernel)
    parts = PostAttention(
        output,
        norm,
        output_norm=output_norm,
        down_norm=down_norm,
        multiplier=modules.multiplier,
        is_parallel=modules.is_parallel,
    )
    if modules.mlp is not None:
        return Layer(begins, attention_part, parts, structure.calls, modules.mlp)
    activation = as_activation(modules.activation)
    assert activation is not None
    gate_up, down = mlp
    if not is_first:
        down = replace(down, bias=None)
    parts = replace(parts, gate_up=gate_up, down=down, activation=activation[0])
    if parts.is_gated != activation[1]:
        return f"the MLP has other sizes than {type(modules.activation).__name__} suggests"
    return Layer(begins, attention_part, parts, structure.calls)


def _linear(module: nn.Module, linears: Linears, kernel: StreamingLinear) -> Linear | str:
    """Weight, bias and adapters of vLLM's linear layer, or why adapters cannot be added here."""
    linear = linears[base_layer(module)]
    adapters = adapters_of(module, linear.weight.shape, kernel.native, kernel.dtype)
    return adapters if isinstance(adapters, str) else replace(linear, adapters=adapters)


def _why_unsuited(modules: LayerModules, linears: Linears) -> str:
    """Why the products, norms and activation of a layer cannot be computed here; or ""."""
    left = [base for one in modules.linears if (base := base_layer(one)) not in linears]
    if left:
        return "vLLM's own kernels compute linear layers of it"
    if modules.mlp is None and as_activation(modules.activation) is None:
        return f"the activation is another one ({type(modules.activation).__name__})"
    for norm in modules.norms:
        if norm is not None and as_norm(norm) is None:
            return f"a norm is another one ({type(norm).__name__})"
    return ""


def as_activation(module: Any) -> tuple[Activation, bool] | None:
    """Activation of a module of vLLM's or torch's, and whether it has a gate; None if unknown."""
    kind = type(module)
    if kind is SiluAndMul:
        return "silu", True
    if kind in {GeluAndMul, nn.GELU}:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu", kind is GeluAndMul
    found = PLAIN_ACTIVATIONS.get(kind)
    return None if found is None else (found, False)


def _why_not_added(modules: LayerModules, sums: RankSums | None) -> str:
    """Why the ranks of a tensor-parallel group cannot add up in native calls; or ""."""
    # vLLM's module adds its experts up by itself.
    added = (modules.output,) if modules.mlp is not None else (modules.output, modules.down)
    return why_not_added(modules.linears, added, sums)

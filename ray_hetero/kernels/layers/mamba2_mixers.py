"""Mixers of Mamba 2 on a CPU rank: those of Granite 4, Nemotron-H, Falcon-H1, Zamba 2 and of
whatever else has vLLM's module for them.

A decode step of a mixer is one native call (csrc/kernels/mamba2_mixer.h): the product of its input,
the convolution and the recurrence with the states of the step's requests, the norm of its heads,
and the product of its output.  What is around it differs from model to model, and stays vLLM's.
Any other step is computed by vLLM's module.  States lie where and as vLLM has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context

from ray_hetero.compat.models import mamba2
from ray_hetero.compat.models.lora import base_layer
from ray_hetero.kernels import step_trace
from ray_hetero.kernels.custom_ops import register_op
from ray_hetero.kernels.layers import layer_tokens, linear_states
from ray_hetero.kernels.layers.layer_parts import Linear
from ray_hetero.kernels.linear.rank_sums import meeting, why_not_added
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.kernels.step_route import Place, Reason
from ray_hetero.kernels.step_trace import Event

MULTIPLE = 16
"""Divisor of the elements of a value, and of a state's rows: what csrc/kernels/mamba2.h takes."""


@dataclass(frozen=True)
class Mamba2Shape:
    """Heads of a mixer on a rank, and elements of their parts."""

    heads: int
    groups: int
    """Groups of heads that have keys and queries (B and C) in common."""
    value: int
    state: int
    """Elements of a key, of a query, and of a row of the state."""

    @property
    def values(self) -> int:
        """Elements of all heads' values."""
        return self.heads * self.value

    @property
    def channels(self) -> int:
        """Elements of a token's values, keys and queries, which are convolved."""
        return self.values + 2 * self.groups * self.state

    @property
    def inputs(self) -> int:
        """Elements that the first product gives of a token."""
        return self.values + self.channels + self.heads


@dataclass(frozen=True, eq=False)
class Mamba2Parts:
    """The parts of a mixer of Mamba 2."""

    shape: Mamba2Shape
    input: Linear
    """Layer for output gates, values, keys, queries and steps."""
    factors: torch.Tensor | None
    """[outputs of `input`], bf16, of what it gives; None for none."""
    taps: torch.Tensor
    """[taps, channels], bf16: weights of the convolution, the last of the token itself."""
    tap_bias: torch.Tensor | None
    """[channels], float32."""
    rates: torch.Tensor
    """[heads], float32, below zero: factors of the decays."""
    step_bias: torch.Tensor
    """[heads], float32: addends of the steps."""
    skips: torch.Tensor
    """[heads], float32: factors of a value that is added to what its head gives."""
    norm: torch.Tensor | None
    """[values], bf16: weight of the norm of what heads give; None for no norm."""
    norm_groups: int
    """Groups of values that are normalised each by itself."""
    epsilon: float
    """Addend of that norm's squares."""
    output: Linear

    def native(self, module: ModuleType, sums: Any = None) -> Any:
        """The native module's object.

        Args:
            module: the native module.
            sums: its object of the group whose ranks have parts of the heads, if any.

        """
        shape = self.shape

        def address(x: torch.Tensor | None) -> int:
            return 0 if x is None else x.data_ptr()

        return module.Mamba2Mixer(
            heads=(shape.heads, shape.groups, shape.value, shape.state),
            input=self.input.native, factors=address(self.factors), taps=address(self.taps),
            tap_count=len(self.taps), tap_bias=address(self.tap_bias),
            rates=address(self.rates), step_bias=address(self.step_bias),
            skips=address(self.skips), norm=address(self.norm), norm_groups=self.norm_groups,
            epsilon=self.epsilon, output=self.output.native, sums=sums,
        )  # fmt: skip


class MixerOperator:
    """A mixer that is computed as one operator.

    Args:
        mixer: vLLM's, for steps that are not computed here.
        parts: of the mixer.
        kernel: what computes linear layers.

    """

    def __init__(self, mixer: Any, parts: Mamba2Parts, kernel: StreamingLinear) -> None:
        self.parts = parts
        self._mixer, self._kernel = mixer, kernel
        self._native = parts.native(kernel.native, kernel.sums and kernel.sums.native)

    def __call__(self, x: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
        """Compute the mixer of x [M, N], bf16; `factors` are what vLLM's module is given."""
        tokens = len(x)
        step = self._step(tokens, factors)
        if isinstance(step, Reason):
            layer_tokens.count_instead(step)
        if not isinstance(step, torch.Tensor):
            layer_tokens.count(1, by_operators=tokens)
            found: torch.Tensor = self._mixer(x, factors)
            return found
        layer_tokens.count(1, native=tokens)
        x = x.contiguous()
        y = torch.empty_like(x)
        with meeting(self._kernel.sums):
            self._native.run(
                **linear_states.native(self._mixer.kv_cache, step),
                x=x.data_ptr(), y=y.data_ptr(), level=self._kernel.level,
            )  # fmt: skip
        return y

    def _step(self, tokens: int, factors: torch.Tensor | None) -> torch.Tensor | Reason | None:
        """Numbers of the states of the running step, if it is a native one; or why it is not."""
        of_layers = get_forward_context().attn_metadata
        # Runs without requests have none; the first ones have no states yet either.
        if not isinstance(of_layers, dict):
            return None
        numbers = mamba2.states_of_tokens(of_layers[self._mixer.prefix], tokens)
        if numbers is None:
            return None
        route = self._kernel.route_of(tokens, 1)
        step_trace.note(Event.ROUTE, route)
        if route.place is not Place.NATIVE:
            return None
        own = self.parts.factors
        are_own = factors is own or (
            factors is not None and own is not None and factors.data_ptr() == own.data_ptr()
        )
        shape = self.parts.shape
        of_inputs = len(self.parts.taps) - 1, shape.channels
        of_heads = shape.heads, shape.value, shape.state
        if not are_own or not linear_states.are_known(self._mixer.kv_cache, of_inputs, of_heads):
            return Reason.UNKNOWN_ATTENTION
        return numbers


_library = torch.library.Library("ray_hetero", "FRAGMENT")
_mixers: list[MixerOperator] = []
"""Mixers of this process, by the number that the operator is called with."""


def _mamba2_mixer(x: torch.Tensor, factors: torch.Tensor | None, number: int) -> torch.Tensor:
    return _mixers[number](x, factors)


def _shape(x: torch.Tensor, factors: torch.Tensor | None, number: int) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


register_op(_library, "mamba2_mixer", _mamba2_mixer, _shape)


class NativeMixer(nn.Module):  # type: ignore[misc]
    """Replaces vLLM's mixer; its parameters are those of `MambaMixer2.forward`.

    Args:
        operator: that computes it.

    """

    def __init__(self, operator: MixerOperator) -> None:
        super().__init__()
        _mixers.append(operator)
        self.number = len(_mixers) - 1

    def forward(
        self, hidden_states: torch.Tensor, mup_vector: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the mixer."""
        found: torch.Tensor = torch.ops.ray_hetero.mamba2_mixer(
            hidden_states, mup_vector, self.number
        )
        return found


@dataclass(frozen=True, eq=False)
class FoundMixer:
    """A mixer that can be computed as one operator."""

    owner: nn.Module
    """vLLM's module that calls it."""
    name: str
    """Attribute of the owner that holds it."""
    operator: MixerOperator

    def install(self) -> None:
        """Put the operator into the place of vLLM's module."""
        setattr(self.owner, self.name, NativeMixer(self.operator))


def find_mixers(
    model: nn.Module, linears: Mapping[nn.Module, Linear], kernel: StreamingLinear
) -> tuple[list[FoundMixer], Counter[str]]:
    """Find the mixers of a model whose weights are loaded; arguments as of `fuse`.

    Returns:
        Those that can be operators, and how many cannot, by why.

    """
    found, left = [], Counter[str]()
    for owner, name, mixer in _all_mixers(model):
        parts = parts_of(mixer, getattr(owner, "mup_vector", None), linears, kernel)
        if isinstance(parts, str):
            left[parts] += 1
        else:
            found.append(FoundMixer(owner, name, MixerOperator(mixer, parts, kernel)))
    return found, left


def _all_mixers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for owner in list(model.modules()):
        for name, mixer in owner.named_children():
            if mamba2.is_mixer(mixer):
                yield owner, name, mixer


def parts_of(
    mixer: Any, factors: torch.Tensor | None, linears: Mapping[nn.Module, Linear],
    kernel: StreamingLinear,
) -> Mamba2Parts | str:  # fmt: skip
    """A mixer's parts, or why it is left to vLLM.

    Args:
        mixer: vLLM's, whose weights are loaded.
        factors: that it is called with.
        linears: linear layers that the kernel computes, by vLLM's module.
        kernel: what computes them.

    """
    divided = (mixer.in_proj, mixer.out_proj)
    if why := _why_unsuited(mixer, factors, linears, kernel):
        return why
    if why := why_not_added(divided, (mixer.out_proj,), kernel.sums):
        return why
    output, norm, bias = linears[mixer.out_proj], mixer.norm, mixer.conv1d.bias
    if kernel.sums is not None and not kernel.sums.is_first:
        output = replace(output, bias=None)
    return Mamba2Parts(
        shape=_shape_of(mixer), input=linears[mixer.in_proj],
        factors=factors,
        taps=mixer.conv_weights.T.contiguous(),
        tap_bias=None if bias is None else bias.data.float().contiguous(),
        rates=mixer.A.data.float().contiguous(),
        step_bias=mixer.dt_bias.data.float().contiguous(),
        skips=mixer.D.data.float().contiguous(),
        norm=norm.weight.data.contiguous() if norm.use_rms_norm else None,
        norm_groups=norm.n_groups // mixer.tp_size if norm.use_rms_norm else 1,
        epsilon=float(norm.variance_epsilon), output=output,
    )  # fmt: skip


def _shape_of(mixer: Any) -> Mamba2Shape:
    return Mamba2Shape(
        heads=mixer.num_heads // mixer.tp_size, groups=mixer.n_groups // mixer.tp_size,
        value=int(mixer.head_dim), state=int(mixer.ssm_state_size),
    )  # fmt: skip


def _why_unsuited(
    mixer: Any, factors: torch.Tensor | None, linears: Mapping[nn.Module, Linear],
    kernel: StreamingLinear,
) -> str:  # fmt: skip
    """Why a mixer cannot be computed here; or ""."""
    if kernel.dtype != torch.bfloat16:
        return "a mixer is computed here in bfloat16 only (--dtype bfloat16)"
    if why := mamba2.why_unknown(mixer):
        return why
    if any(base_layer(one) is not one for one in (mixer.in_proj, mixer.out_proj)):
        return "a mixer with adapters is left to vLLM"
    if mixer.in_proj not in linears or mixer.out_proj not in linears:
        return "vLLM's own kernels compute linear layers of it"
    weights = (mixer.conv_weights, factors, mixer.norm.weight)
    if any(one is not None and one.dtype != torch.bfloat16 for one in weights):
        return "its convolution, factors or norm are of another type than the linear layers"
    shape = _shape_of(mixer)
    if shape.value % MULTIPLE or shape.state % MULTIPLE:
        return (
            f"values and rows of states have {shape.value} and {shape.state} elements, expected "
            f"multiples of {MULTIPLE}"
        )
    if factors is not None and factors.numel() != shape.inputs:
        return f"it has {factors.numel()} factors, expected {shape.inputs}"
    return ""

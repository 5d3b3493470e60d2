"""Layers with a Gated DeltaNet on a CPU rank, with their MLP or up to their experts.

A decode step of such a layer is one native call (csrc/kernels/gated_delta_layer.h): the norm before
it, its products, the convolution and the recurrence with the states of the step's requests, the
norm of its heads, and what comes behind.  States lie where and as vLLM has them.  Any other step
(prompts, drafts, more tokens than a step has) is computed by vLLM's own module between two norms.

Each rank of a tensor-parallel group has some of the heads.  What they give is added up inside of
the call (rank_sums.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context

from ray_hetero.compat.models.gated_delta import states_of_tokens
from ray_hetero.kernels import step_trace
from ray_hetero.kernels.custom_ops import register_op
from ray_hetero.kernels.layers import layer_tokens
from ray_hetero.kernels.layers.fused_modules import GatedDeltaRun
from ray_hetero.kernels.layers.layer_parts import Linear, Norm, PostAttention
from ray_hetero.kernels.layers.post_attention import add_and_norm, input_norm, results_like
from ray_hetero.kernels.linear.rank_sums import meeting
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.kernels.step_route import Place, Reason
from ray_hetero.kernels.step_trace import Event

STATE_TYPES = (torch.float32, torch.bfloat16)
"""Types of the states of heads."""

_library = torch.library.Library("ray_hetero", "FRAGMENT")
_layers: list[GatedDeltaLayer] = []
"""Layers of this process, by the number that the operator is called with."""


@dataclass(frozen=True)
class GatedDeltaShape:
    """Heads of a Gated DeltaNet on a rank, and elements of their parts."""

    key_heads: int
    value_heads: int
    key: int
    value: int
    is_by_key_head: bool
    """Whether products give what belongs to a key head together; else each part for all heads."""

    @property
    def channels(self) -> int:
        """Elements of a token's queries, keys and values, which are convolved."""
        return 2 * self.key_heads * self.key + self.value_heads * self.value


@dataclass(frozen=True, eq=False)
class GatedDeltaParts:
    """The parts of a layer with a Gated DeltaNet."""

    shape: GatedDeltaShape
    norm: Norm
    """Norm of the layer's input."""
    input: Linear
    """Layer for queries, keys, values and output gates."""
    gates: Linear
    """Layer for a write gate and a decay of each value head; further outputs are zeros."""
    taps: torch.Tensor
    """[taps, channels], bf16: weights of the convolution, the last of the token itself."""
    rates: torch.Tensor
    """[value heads], float32, below zero: factors of the decays."""
    rate_bias: torch.Tensor
    """[value heads], float32: addends of the decays."""
    head_norm: torch.Tensor
    """[elements of a value], float32: weight of the norm of what heads give."""
    epsilon: float
    """Addend of that norm's squares."""
    is_sigmoid: bool
    """Whether output gates are a sigmoid; else they are SiLU."""
    behind: PostAttention
    """The output projection and the norm behind it, and the MLP if it has no experts."""

    def native(self, module: ModuleType, sums: Any = None) -> Any:
        """The native module's object.

        Args:
            module: the native module.
            sums: its object of the group whose ranks have parts of the heads, if any.

        """
        shape = self.shape
        return module.GatedDeltaLayer(
            heads=(
                shape.key_heads, shape.value_heads, shape.key, shape.value, shape.is_by_key_head,
            ),
            norm=self.norm.native,
            input=self.input.native,
            gates=self.gates.native,
            taps=self.taps.data_ptr(),
            tap_count=len(self.taps),
            rates=self.rates.data_ptr(),
            rate_bias=self.rate_bias.data_ptr(),
            head_norm=self.head_norm.data_ptr(),
            epsilon=self.epsilon,
            is_sigmoid=self.is_sigmoid,
            behind=self.behind.native(module, sums),
        )  # fmt: skip


class GatedDeltaLayer:
    """Computes a layer, up to what its experts are given or to what is added to the residual.

    Args:
        parts: of the layer.
        module: vLLM's, for steps that are not computed here.
        kernel: what computes linear layers.
        mlp: vLLM's module of the MLP that is computed here, for the same; None where none is.

    """

    def __init__(
        self, parts: GatedDeltaParts, module: Any, kernel: StreamingLinear, mlp: Any = None
    ) -> None:
        self.parts = parts
        self._module = module
        self._kernel = kernel
        self._mlp = mlp
        self._native = parts.native(kernel.native, kernel.sums and kernel.sums.native)

    def replacement(self, mlp: Any) -> nn.Module:
        """Module that takes the layer's place in vLLM's model, before `mlp` if that is one."""
        return GatedDeltaRun(register(self), mlp)

    def __call__(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layer.

        Args:
            hidden: [M, N], bf16.
            residual: [M, N], bf16; None at the beginning of a model.

        Returns:
            [M, N], the input of the experts or what is still to be added to the residual, and the
            new residual [M, N].

        """
        step = self._decode_step(hidden, residual)
        native = 0 if step is None else len(hidden)
        layer_tokens.count(1, native=native, by_operators=len(hidden) - native)
        return self._by_operators(hidden, residual) if step is None else step

    def _decode_step(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A decode step in one native call; None if this step is something else."""
        of_layers = get_forward_context().attn_metadata
        # Runs without requests have none; the first ones have no states yet either.
        if not isinstance(of_layers, dict):
            return None
        numbers = states_of_tokens(of_layers[self._module.prefix], len(hidden))
        if numbers is None:
            return None
        route = self._kernel.route_of(len(hidden), 1)
        step_trace.note(Event.ROUTE, route)
        if route.place is not Place.NATIVE:
            return None
        states = self._module.kv_cache
        if not self._are_known(states):
            layer_tokens.count_instead(Reason.UNKNOWN_ATTENTION)
            return None
        inputs, heads = states
        hidden = hidden.contiguous()
        residual = None if residual is None else residual.contiguous()
        y, total = torch.empty_like(hidden), torch.empty_like(hidden)
        with meeting(self._kernel.sums):
            self._native.run(
                inputs=(inputs.data_ptr(), inputs.stride(0)),
                heads=(heads.data_ptr(), heads.stride(0), heads.dtype == torch.float32),
                states=len(heads),
                numbers=numbers.data_ptr(),
                m=len(hidden),
                hidden=hidden.data_ptr(),
                residual=0 if residual is None else residual.data_ptr(),
                y=y.data_ptr(),
                sum=total.data_ptr(),
                level=self._kernel.level,
            )
        return y, total

    def _are_known(self, states: Any) -> bool:
        """Inputs [states, taps - 1, channels] and heads [states, value heads, value, key].

        vLLM's operators for CPUs keep a head as [key, value] all the same.
        """
        shape, taps = self.parts.shape, self.parts.taps
        if len(states) != 2 or len(states[0]) != len(states[1]):
            return False
        inputs, heads = states
        return bool(
            inputs.dtype == torch.bfloat16
            and heads.dtype in STATE_TYPES
            and tuple(inputs.shape[1:]) == (len(taps) - 1, shape.channels)
            and tuple(heads.shape[1:]) == (shape.value_heads, shape.value, shape.key)
            and inputs[0].is_contiguous()
            and heads[0].is_contiguous()
        )

    def _by_operators(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self.parts
        x, total = input_norm(hidden, residual, parts.norm)
        x = add_and_norm(self._module(x), total, parts.behind.norm)
        return x if self._mlp is None else self._mlp(x), total


def _gated_delta_layer(
    hidden: torch.Tensor, residual: torch.Tensor | None, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _layers[layer](hidden, residual)


def _shapes(
    hidden: torch.Tensor, residual: torch.Tensor | None, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return results_like(hidden)


def register(layer: GatedDeltaLayer) -> int:
    """Register a layer with the operator; returns the number that it is called with."""
    _layers.append(layer)
    return len(_layers) - 1


register_op(_library, "gated_delta_layer", _gated_delta_layer, _shapes)

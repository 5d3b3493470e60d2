"""Layers with a Gated DeltaNet on a CPU rank, as a kind of layers (kinds.py): those of Qwen3-Next
and Qwen3.5 that have a linear state in the place of keys and values.

A decode step of such a layer is one native call (csrc/kernels/gated_delta_layer.h): the norm before
it, its products, the convolution and the recurrence with the states of the step's requests, the
norm of its heads, and what comes behind, an MLP too.  States lie where and as vLLM has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.activation import SiluAndMul

from ray_hetero.compat.models import gated_delta
from ray_hetero.compat.models.decoder_classes import has_forward_of
from ray_hetero.kernels.formats import PackedWeight
from ray_hetero.kernels.formats.base import BLOCK, pack
from ray_hetero.kernels.layers import linear_states
from ray_hetero.kernels.layers.attention import as_norm
from ray_hetero.kernels.layers.decode_step import IsNative, NativeStep, StepOf
from ray_hetero.kernels.layers.layer_parts import Linear, Norm, PostAttention
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.kernels.step_route import Reason

KEY_MULTIPLE, VALUE_MULTIPLE = 16, 32
"""Divisors of the elements of a key and of a value: what csrc/kernels/gated_delta.h takes."""


@dataclass(frozen=True)
class GatedDeltaModules:
    """vLLM's modules of a layer with a Gated DeltaNet, by the part that each is."""

    input_norm: Any
    """Norm of the products' input."""
    delta: Any
    """All from the products of the input to that of the output, in one module of vLLM's."""
    norm: Any
    """Norm of the input of the MLP or the experts."""
    mlp: Any
    """MLP or experts, in one module of vLLM's."""
    is_plain_mlp: bool
    """Whether that is a gate and up, an activation, and down."""

    @property
    def linears(self) -> tuple[Any, ...]:
        """Linear layers in the order of their products, without that of the gates."""
        own = (self.delta.in_proj_qkvz, self.delta.out_proj)
        return (*own, self.mlp.gate_up_proj, self.mlp.down_proj) if self.is_plain_mlp else own

    @property
    def added(self) -> tuple[Any, ...]:
        """Linear layers whose products the ranks of a group add up."""
        own = (self.delta.out_proj,)
        return (*own, self.mlp.down_proj) if self.is_plain_mlp else own

    @property
    def divided(self) -> tuple[Any, ...]:
        """Linear layers of which each rank of a group has a part."""
        return (*self.linears, self.delta.in_proj_ba)

    @property
    def norms(self) -> tuple[Any, Any]:
        """All norms of tokens."""
        return self.input_norm, self.norm

    def attended(self, positions: Any, x: Any) -> Any:
        """All between the two norms, computed by vLLM's module; no position counts."""
        return self.delta(x)


def gated_delta_modules(model: Any, layer: Any) -> GatedDeltaModules | None:
    """The modules of a layer of a model of vLLM's; None if it computes something else."""
    if (
        not has_forward_of(model, "Qwen3NextModel")
        or not has_forward_of(layer, "Qwen3NextDecoderLayer")
        or layer.layer_type != "linear_attention"
        or layer.layer_scale
        or layer.use_attn_reduce_scatter_for_moe
    ):
        return None
    mlp = layer.mlp
    return GatedDeltaModules(
        input_norm=layer.input_layernorm,
        delta=layer.linear_attn,
        norm=layer.post_attention_layernorm,
        mlp=mlp,
        is_plain_mlp=has_forward_of(mlp, "Qwen2MoeMLP") and mlp.expert_gate is None,
    )


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


class GatedDeltas:
    """Layers with a Gated DeltaNet, as a `LayerKind`."""

    about = "a Gated DeltaNet"

    def modules(self, decoder: Any, layer: Any) -> GatedDeltaModules | None:
        """The modules of a layer; None if it is of another kind."""
        return gated_delta_modules(decoder, layer)

    def why_unknown(self, modules: GatedDeltaModules) -> str:
        """Why the state and the activation of a layer cannot be computed here; or ""."""
        if why := gated_delta.why_unknown(modules.delta):
            return why
        if modules.is_plain_mlp and type(modules.mlp.act_fn) is not SiluAndMul:
            return f"the activation is another one ({type(modules.mlp.act_fn).__name__})"
        return ""

    def parts(
        self, modules: GatedDeltaModules, linears: Mapping[nn.Module, Linear],
        kernel: StreamingLinear,
    ) -> tuple[GatedDeltaParts, StepOf] | str:  # fmt: skip
        """A layer's parts and steps, as `LayerKind` says."""
        delta = modules.delta
        taps = gated_delta.convolution(delta)
        if taps.dtype != torch.bfloat16:
            return "the convolution is of another type than the linear layers"
        shape = GatedDeltaShape(
            key_heads=delta.num_k_heads // delta.tp_size,
            value_heads=delta.num_v_heads // delta.tp_size,
            key=int(delta.head_k_dim), value=int(delta.head_v_dim),
            is_by_key_head=bool(delta.gqa_interleaved_layout),
        )  # fmt: skip
        if shape.key % KEY_MULTIPLE or shape.value % VALUE_MULTIPLE:
            return (
                f"heads have keys of {shape.key} and values of {shape.value} elements, expected "
                f"multiples of {KEY_MULTIPLE} and {VALUE_MULTIPLE}"
            )
        input_norm, norm = as_norm(modules.input_norm), as_norm(modules.norm)
        assert input_norm is not None
        assert norm is not None
        queries, output, *mlp = (linears[one] for one in modules.linears)
        behind = PostAttention(output, norm)
        if mlp:
            behind = replace(behind, gate_up=mlp[0], down=mlp[1])
        parts = GatedDeltaParts(
            shape=shape, norm=input_norm, input=queries, gates=_gates(delta, linears, kernel),
            taps=taps.T.contiguous(), rates=-torch.exp(delta.A_log.data.float()),
            rate_bias=delta.dt_bias.data.float().contiguous(),
            head_norm=delta.norm.weight.data.float().contiguous(), epsilon=float(delta.norm.eps),
            is_sigmoid=delta.norm.activation == "sigmoid", behind=behind,
        )  # fmt: skip

        def step_of(
            positions: torch.Tensor, tokens: int, is_native: IsNative
        ) -> NativeStep | Reason | None:
            """States of the running step, as `StepOf` says."""
            of_layers = get_forward_context().attn_metadata
            # Runs without requests have none; the first ones have no states yet either.
            if not isinstance(of_layers, dict):
                return None
            numbers = gated_delta.states_of_tokens(of_layers[delta.prefix], tokens)
            if numbers is None or not is_native(1):
                return None
            # vLLM's operators for CPUs keep a head as [key, value] all the same.
            of_inputs = len(parts.taps) - 1, shape.channels
            of_heads = shape.value_heads, shape.value, shape.key
            if not linear_states.are_known(delta.kv_cache, of_inputs, of_heads):
                return Reason.UNKNOWN_ATTENTION
            return NativeStep(linear_states.native(delta.kv_cache, numbers), numbers)

        return parts, step_of


def _gates(delta: Any, linears: Mapping[nn.Module, Linear], kernel: StreamingLinear) -> Linear:
    """The product for write gates and decays, with rows of zeros up to a whole block."""
    found = linears.get(delta.in_proj_ba)
    if found is not None:
        return found
    weight = gated_delta.weight_of(delta.in_proj_ba, kernel.dtype)
    padded = functional.pad(weight, (0, 0, 0, -len(weight) % BLOCK))
    return Linear(PackedWeight.made(pack(padded), kernel.native), None)

"""Decoder layers of a CPU rank, from one attention to the next, as one operator.

A decode step's time on a socket is that of reading the weights, and of what lies between the
products: operators whose instructions the weights have driven out of the caches, each of which
calls all threads together anew.  Here the products between two attentions, with their norms and
the activation, are one call of csrc/between_attentions.h; a GPU that computes prompts
(borrowed_gpu.py) gets them as one piece of work too, and sends back one result instead of four.

The modules of a model are left as they are; only those that compute are replaced, one by the whole
and the others by modules that pass on what they are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.utils.torch_utils import direct_register_custom_op

from ray_hetero.packed_weights import PackedWeight
from ray_hetero.streaming_linear import StreamingLinear

MODELS = {"LlamaModel", "Qwen2Model", "Qwen3Model"}
LAYERS = {"LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
ATTENTIONS = {"LlamaAttention", "Qwen2Attention", "Qwen3Attention"}
PERCEPTRONS = {"LlamaMLP", "Qwen2MLP"}
"""Classes of vLLM whose forward does what `FusedLayer` does, see tests/unit/test_decoder_layers.py;
their subclasses may do something else."""

_library = torch.library.Library("ray_hetero", "FRAGMENT")
_fused: list[FusedLayer] = []
"""Of this process, by the number that the operator is called with."""


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear layer."""

    weight: PackedWeight
    """W [N, K]."""
    bias: torch.Tensor | None
    """[N], float32."""

    @property
    def native(self) -> tuple[int, int, int, int, Any]:
        """What the native module takes: addresses, shape, what belongs to a compact weight."""
        bias = 0 if self.bias is None else self.bias.data_ptr()
        return self.weight.data.data_ptr(), bias, *self.weight.shape, self.weight.compact


@dataclass(frozen=True, eq=False)
class Norm:
    """A root-mean-square norm."""

    weight: torch.Tensor
    """[N], bf16."""
    epsilon: float

    @property
    def native(self) -> tuple[int, float]:
        """What the native module takes."""
        return self.weight.data_ptr(), self.epsilon


@dataclass(frozen=True, eq=False)
class Parts:
    """What is computed from one attention to the next, in this order."""

    output: Linear
    norm: Norm
    gate_up: Linear
    down: Linear
    next_norm: Norm | None = None
    next: Linear | None = None
    """Queries, keys and values of the next layer; None after the last."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All linear layers."""
        found = (self.output, self.gate_up, self.down, self.next)
        return tuple(linear for linear in found if linear is not None)

    @property
    def outputs(self) -> int:
        """Size of the result."""
        return (self.next or self.down).weight.shape[0]


class FusedLayer:
    """Computes parts: few tokens in one native call, many on a borrowed GPU."""

    def __init__(self, parts: Parts, kernel: StreamingLinear) -> None:
        self.parts = parts
        self._kernel = kernel
        self._is_compact = any(linear.weight.compact is not None for linear in parts.linears)
        self._native = kernel.native.Between(
            output=parts.output.native,
            norm=parts.norm.native,
            gate_up=parts.gate_up.native,
            down=parts.down.native,
            next_norm=parts.next_norm and parts.next_norm.native,
            next=parts.next and parts.next.native,
        )

    def __call__(
        self, attended: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From the output of one attention to the input of the next.

        Args:
            attended: [M, K], bf16.
            residual: [M, N], bf16; left as it is.

        Returns:
            [M, outputs] and the new residual [M, N]; after the last layer what is to be added to
            the residual, and it.

        """
        tokens = attended.shape[0]
        many = self._kernel.prompts
        if (
            many is not None
            and tokens >= many.from_tokens
            and all(many.gpu.suits(linear.weight.data, tokens) for linear in self.parts.linears)
        ):
            return many.gpu.between(self.parts, attended, residual)
        if tokens > self._kernel.few_tokens:
            return self.one_by_one(attended, residual)
        attended, residual = attended.contiguous(), residual.contiguous()
        result = attended.new_empty((tokens, self.parts.outputs))
        total = torch.empty_like(residual)
        self._native.run(
            attended.data_ptr(),
            residual.data_ptr(),
            tokens,
            total.data_ptr(),
            result.data_ptr(),
            self._kernel.uses_amx(tokens, is_compact=self._is_compact),
        )
        return result, total

    def one_by_one(
        self, attended: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same as a sequence of operators; arguments and result as of a call."""
        parts, total = self.parts, residual.clone(memory_format=torch.contiguous_format)
        hidden = self._linear(attended, parts.output)
        _add_and_norm(hidden, total, parts.norm)
        gate_up = self._linear(hidden, parts.gate_up)
        gated = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        torch.ops._C.silu_and_mul(gated, gate_up)
        hidden = self._linear(gated, parts.down)
        if parts.next is None or parts.next_norm is None:
            return hidden, total
        _add_and_norm(hidden, total, parts.next_norm)
        return self._linear(hidden, parts.next), total

    def _linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        return self._kernel.compute(x, linear.weight, linear.bias)


def _add_and_norm(x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> None:
    """residual += x, x = norm(residual), in place."""
    torch.ops._C.fused_add_rms_norm(x, residual, norm.weight, norm.epsilon)


def _between_attentions(
    attended: torch.Tensor, residual: torch.Tensor, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _fused[layer](attended, residual)


def _shapes(
    attended: torch.Tensor, residual: torch.Tensor, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    result = attended.new_empty((attended.shape[0], _fused[layer].parts.outputs))
    return result, torch.empty_like(residual, memory_format=torch.contiguous_format)


direct_register_custom_op(
    "between_attentions",
    _between_attentions,
    fake_impl=_shapes,
    target_lib=_library,
    dispatch_key="CPU",
)


class _Fused(nn.Module):  # type: ignore[misc]
    """In the place of the norm behind an attention."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, attended: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result: tuple[torch.Tensor, torch.Tensor] = torch.ops.ray_hetero.between_attentions(
            attended, residual, self.layer
        )
        return result


class _NoLinear(nn.Module):  # type: ignore[misc]
    """In the place of a linear layer."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x, None


class _NoNorm(nn.Module):  # type: ignore[misc]
    """In the place of a norm that adds a residual."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, residual


def fuse(model: nn.Module, linears: Mapping[nn.Module, Linear], kernel: StreamingLinear) -> int:
    """Fuse what can be fused of a model whose weights are loaded.

    Args:
        model: vLLM's.
        linears: its linear layers that the kernel computes.
        kernel: what computes them.

    Returns:
        How many layers were fused.

    """
    before = len(_fused)
    for decoder in model.modules():
        # Hidden states that are wanted from between layers are not there any more.
        wanted = getattr(decoder, "aux_hidden_state_layers", ())
        if type(decoder).__name__ in MODELS and not wanted:
            layers = list(decoder.layers)[decoder.start_layer : decoder.end_layer]
            for layer, following in zip(layers, [*layers[1:], None], strict=True):
                _fuse_layer(layer, following, linears, kernel)
    return len(_fused) - before


def _fuse_layer(
    layer: Any,
    following: Any,
    linears: Mapping[nn.Module, Linear],
    kernel: StreamingLinear,
) -> None:
    if not _is_known(layer):
        return
    attention, perceptron = layer.self_attn, layer.mlp
    own = [attention.o_proj, perceptron.gate_up_proj, perceptron.down_proj]
    norm = _norm(layer.post_attention_layernorm)
    # Tensor-parallel ranks add their products up in between.
    if norm is None or any(one not in linears or one.tp_size > 1 for one in own):
        return
    output, gate_up, down = (linears[one] for one in own)
    next_norm = next_linear = None
    if following is not None and _is_known(following):
        next_norm = _norm(following.input_layernorm)
        next_linear = linears.get(following.self_attn.qkv_proj)
    if next_norm is None or next_linear is None:
        parts = Parts(output, norm, gate_up, down)
    else:
        parts = Parts(output, norm, gate_up, down, next_norm, next_linear)
        following.input_layernorm = _NoNorm()
        following.self_attn.qkv_proj = _NoLinear()
    _fused.append(FusedLayer(parts, kernel))
    attention.o_proj = _NoLinear()
    layer.post_attention_layernorm = _Fused(len(_fused) - 1)
    layer.mlp = nn.Identity()


def _is_known(layer: Any) -> bool:
    return (
        type(layer).__name__ in LAYERS
        and type(layer.self_attn).__name__ in ATTENTIONS
        and type(layer.mlp).__name__ in PERCEPTRONS
        and type(layer.mlp.act_fn).__name__ == "SiluAndMul"
    )


def _norm(norm: Any) -> Norm | None:
    if type(norm).__name__ != "RMSNorm" or not norm.has_weight:
        return None
    weight = norm.weight.data
    if norm.variance_size_override is not None or weight.dtype != torch.bfloat16:
        return None
    return Norm(weight, float(norm.variance_epsilon))

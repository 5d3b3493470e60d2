"""The parts that a decoder layer is made of, as CPU ranks compute it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

from ray_hetero.kernels.formats import HostWeight
from ray_hetero.kernels.layers.adapters import Adapters
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear

NormKind = Literal["rms", "rms_plus_one", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu_squared": lambda x: functional.relu(x).square(),
}
"""Functions in torch that compute what the native kernels compute by these names."""


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear layer."""

    weight: HostWeight
    """W [N, K]."""
    bias: torch.Tensor | None
    """[N], float32."""
    adapters: Adapters | None = None
    """Adapters of requests, whose results are added to what the layer gives."""

    @property
    def native(self) -> tuple[int, int, Any, Any]:
        """Argument of the native module: addresses of weight and bias, the encoding, adapters."""
        bias = 0 if self.bias is None else self.bias.data_ptr()
        adapters = None if self.adapters is None else self.adapters.native
        return self.weight.data.data_ptr(), bias, self.weight.encoding, adapters


def adapters_in(linears: Iterable[Linear]) -> Adapters | None:
    """Adapters of the first layer that has some; all layers of a step have the same slots."""
    return next((one.adapters for one in linears if one.adapters is not None), None)


def product(kernel: StreamingLinear, x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """Product of a linear layer with x [M, K], bf16, and the addends of its adapters."""
    y = kernel.compute(x, linear.weight, linear.bias)
    if linear.adapters is not None:
        linear.adapters.add(x, y)
    return y


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm of tokens or of heads: a root-mean-square norm weighted by w or by 1 + w, or a layer
    norm."""

    weight: torch.Tensor
    """[N], bf16."""
    epsilon: float
    kind: NormKind = "rms"
    bias: torch.Tensor | None = None
    """[N], bf16; of a layer norm."""
    of_rounded: bool = False
    """Whether a sum is rounded to bf16 before its norm is taken."""

    @property
    def native(self) -> tuple[str, int, int, float, bool]:
        """Argument of the native module."""
        bias = 0 if self.bias is None else self.bias.data_ptr()
        return self.kind, self.weight.data_ptr(), bias, self.epsilon, self.of_rounded

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The norm of x's last dimension in torch, of the weight's dtype.

        Args:
            x: [..., N], of that or float32.
            weight: the norm's, where x is.
            bias: the norm's, where x is.

        """
        weight = self.weight if weight is None else weight
        bias = self.bias if bias is None else bias
        if self.kind == "rms_plus_one":
            x, weight = x.float(), 1 + weight.float()
        else:
            weight = weight.to(x.dtype)
        if self.kind == "layer":
            bias = None if bias is None else bias.to(x.dtype)
            normed = functional.layer_norm(x, weight.shape, weight, bias, self.epsilon)
        else:
            normed = functional.rms_norm(x, weight.shape, weight, self.epsilon)
        return normed.to(self.weight.dtype)


@dataclass(frozen=True, eq=False)
class QkvInput:
    """How a layer begins."""

    norm: Norm
    qkv: Linear
    """Queries, keys and values."""

    @property
    def native(self) -> tuple[Any, Any]:
        """Argument of the native module."""
        return self.norm.native, self.qkv.native


@dataclass(frozen=True, eq=False)
class PostAttention:
    """Operations from one attention to the next."""

    output: Linear
    norm: Norm
    """Norm of the MLP's input."""
    gate_up: Linear | None = None
    """Gate and up in one, or up alone; None where the result is what `norm` gives."""
    down: Linear | None = None
    next: QkvInput | None = None
    """Inputs of the layer that follows; None after the last."""
    activation: Activation = "silu"
    output_norm: Norm | None = None
    """Norm of what `output` gives, before it is added to the residual; None where there is none."""
    down_norm: Norm | None = None
    """Norm of what `down` gives, before it is added to the residual; None where there is none."""
    multiplier: float = 1.0
    """Factor on what is added to the residual."""
    is_parallel: bool = False
    """Whether the MLP's norm is of the residual before the attention is added."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All linear layers."""
        following = None if self.next is None else self.next.qkv
        found = (self.output, self.gate_up, self.down, following)
        return tuple(one for one in found if one is not None)

    @property
    def outputs(self) -> int:
        """Size of the result."""
        return self.linears[-1].weight.shape[0]

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate."""
        assert self.gate_up is not None
        assert self.down is not None
        return self.gate_up.weight.shape[0] != self.down.weight.shape[1]

    def activated(self, x: torch.Tensor) -> torch.Tensor:
        """Input of `down`, computed in torch from the output of `gate_up`."""
        function = ACTIVATIONS[self.activation]
        if not self.is_gated:
            return function(x)
        gate, up = x.chunk(2, dim=-1)
        return function(gate) * up

    def native(self, module: Any, sums: Any = None) -> Any:
        """The native module's object.

        Args:
            module: the native module.
            sums: its object of the group whose ranks have parts of output and down, if any.

        """

        def optional(part: Linear | Norm | QkvInput | None) -> Any:
            return None if part is None else part.native

        return module.PostAttention(
            output=self.output.native,
            output_norm=optional(self.output_norm),
            norm=self.norm.native,
            gate_up=optional(self.gate_up),
            activation=self.activation,
            down=optional(self.down),
            down_norm=optional(self.down_norm),
            multiplier=self.multiplier,
            is_parallel=self.is_parallel,
            next=optional(self.next),
            sums=sums,
        )


@dataclass(frozen=True, eq=False)
class Scores:
    """Transformation of an attention's scores."""

    scale: float
    window: int | None = None
    """Last tokens that are attended to; None for all."""
    soft_cap: float = 0.0
    """Largest magnitude, reached by a hyperbolic tangent; 0 for none."""
    sinks: torch.Tensor | None = None
    """[heads], float32: scores of no token."""

    @property
    def is_plain(self) -> bool:
        """Whether scores are scaled, and nothing else."""
        return self.window is None and not self.soft_cap and self.sinks is None

    def native(self, module: Any) -> Any:
        """The native module's object."""
        return module.Scores(
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=0 if self.sinks is None else self.sinks.data_ptr(),
        )


@dataclass(frozen=True)
class AttentionShape:
    """Heads of a layer's attention."""

    heads: int
    kv_heads: int
    size: int

    @property
    def queries(self) -> int:
        """Elements of a token's queries."""
        return self.heads * self.size

    @property
    def keys(self) -> int:
        """Elements of a token's keys, and of its values."""
        return self.kv_heads * self.size


class CpuBlocks(NamedTuple):
    """Blocks of 32 that the cores compute of an MLP in a step."""

    columns: int
    """Blocks of columns, the first ones."""
    outputs: int = 0
    """Blocks of the MLP's outputs, the first ones; 0 for all."""


CacheAddress = tuple[int, int, int, int]
"""Address of a layer's keys and values, strides of blocks and of heads, and which of the requests
of `NativeLayers.run` are its own."""

"""Kinds of decoder layers that are an operator of their own, each with a native part.

A kind says which modules of vLLM's a layer has, what its native part is, and where the requests of
a step have what it caches.  All else is the same for every kind: a decode step is one native call,
from the norm before the layer's first product to the norm before its experts or to its MLP's
results.  Any other step (prompts, drafts that a kind does not verify, more tokens than a step has)
is computed by vLLM's own module between two norms.  Each rank of a tensor-parallel group has some
heads, whose results are added up inside of the call (rank_sums.py).

A layer with attention to keys and values is of none of these kinds: such layers become one operator
with those that follow them (fusible_layers.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import nn

from ray_hetero.compat.models.lora import base_layer
from ray_hetero.kernels import step_trace
from ray_hetero.kernels.layers import gated_delta_layers, latent_layers, layer_tokens
from ray_hetero.kernels.layers.attention import as_norm
from ray_hetero.kernels.layers.decode_step import NativeStep, StepOf
from ray_hetero.kernels.layers.layer_parts import Linear, Norm, PostAttention
from ray_hetero.kernels.layers.post_attention import (
    Results,
    add_and_norm,
    input_norm,
    results_like,
)
from ray_hetero.kernels.linear.rank_sums import meeting, why_not_added
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.kernels.step_route import Place, Reason
from ray_hetero.kernels.step_trace import Event


class KindModules(Protocol):
    """vLLM's modules of a layer of some kind."""

    @property
    def mlp(self) -> Any:
        """MLP or experts, in one module."""

    @property
    def norms(self) -> tuple[Any, ...]:
        """All norms of tokens."""

    @property
    def linears(self) -> tuple[Any, ...]:
        """Linear layers that the kernel computes, in the order of their products."""

    @property
    def divided(self) -> tuple[Any, ...]:
        """Linear layers of which each rank of a group has a part."""

    @property
    def added(self) -> tuple[Any, ...]:
        """Linear layers whose products the ranks of a group add up."""

    def attended(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """All that lies between the layer's two norms, computed by vLLM's module."""


class KindParts(Protocol):
    """The parts of a layer of some kind."""

    @property
    def norm(self) -> Norm:
        """Norm of the layer's input."""

    @property
    def behind(self) -> PostAttention:
        """Output projection and the norm behind it, and the MLP if that is computed here."""

    def native(self, module: ModuleType, sums: Any = None) -> Any:
        """The native module's object, which computes a step.

        Args:
            module: the native module.
            sums: its object of the group whose ranks have parts of the heads, if any.

        """


class LayerKind(Protocol):
    """A kind of layers, such as those with latents or with a linear state."""

    about: str
    """The kind, in messages."""

    def modules(self, decoder: Any, layer: Any) -> KindModules | None:
        """The modules of a layer of a model of vLLM's; None if it is of another kind."""

    def why_unknown(self, modules: Any) -> str:
        """Why a layer's modules compute more than is known; or ""."""

    def parts(
        self, modules: Any, linears: Mapping[nn.Module, Linear], kernel: StreamingLinear
    ) -> tuple[KindParts, StepOf] | str:
        """A layer's parts and steps, or why they are left to vLLM.

        Args:
            modules: of the layer, none of which is unknown.
            linears: linear layers that the kernel computes, by vLLM's module; what other ranks of
                a group add as well is left out of them.
            kernel: what computes them.

        """


class LayerOperator:
    """A layer that is computed as one operator, up to its experts if it has some.

    Args:
        modules: vLLM's, for steps that are not computed here.
        parts: of the layer.
        step_of: where a step's requests are.
        kernel: what computes linear layers.

    """

    def __init__(
        self, modules: KindModules, parts: KindParts, step_of: StepOf, kernel: StreamingLinear
    ) -> None:
        self.parts = parts
        self._modules, self._step_of, self._kernel = modules, step_of, kernel
        self.native = parts.native(kernel.native, kernel.sums and kernel.sums.native)
        """Native module's object of this layer."""

    @property
    def rest(self) -> nn.Module | None:
        """vLLM's module that comes behind this operator; None if nothing does."""
        return self._modules.mlp if self.parts.behind.gate_up is None else None

    def __call__(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> Results:
        """Compute the layer.

        Args:
            positions: [M].
            hidden: [M, N], bf16.
            residual: [M, N], bf16; None at the beginning of a model.

        Returns:
            [M, N], the input of `rest` or what is still to be added to the residual, and the new
            residual [M, N].

        """
        tokens = len(hidden)
        positions = positions.to(torch.int64).contiguous()
        step = self._step_of(positions, tokens, lambda longest: self._is_native(tokens, longest))
        if isinstance(step, Reason):
            layer_tokens.count_instead(step)
        if not isinstance(step, NativeStep):
            layer_tokens.count(1, by_operators=tokens)
            return self._by_operators(positions, hidden, residual)
        layer_tokens.count(1, native=tokens)
        return self._decode_step(step, hidden, residual)

    def _is_native(self, tokens: int, longest: int) -> bool:
        route = self._kernel.route_of(tokens, longest)
        step_trace.note(Event.ROUTE, route)
        return route.place is Place.NATIVE

    def _decode_step(
        self, step: NativeStep, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> Results:
        hidden = hidden.contiguous()
        residual = None if residual is None else residual.contiguous()
        y, total = results_like(hidden)
        with meeting(self._kernel.sums):
            self.native.run(
                **step.arguments,
                hidden=hidden.data_ptr(),
                residual=0 if residual is None else residual.data_ptr(),
                y=y.data_ptr(),
                sum=total.data_ptr(),
                level=self._kernel.level,
            )
        return y, total

    def _by_operators(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> Results:
        x, total = input_norm(hidden, residual, self.parts.norm)
        attended = self._modules.attended(positions, x)
        x = add_and_norm(attended, total, self.parts.behind.norm)
        return x if self.rest is not None else self._modules.mlp(x), total


KINDS: tuple[LayerKind, ...] = (latent_layers.Latents(), gated_delta_layers.GatedDeltas())


def operator_of(
    decoder: Any, layer: Any, linears: Mapping[nn.Module, Linear], kernel: StreamingLinear
) -> LayerOperator | str | None:
    """Operator of a layer of one of `KINDS`.

    Args:
        decoder: vLLM's model.
        layer: one of its layers.
        linears: linear layers that the kernel computes, by vLLM's module.
        kernel: what computes them.

    Returns:
        Why the layer is left to vLLM, if it is; None if it is of another kind.

    """
    for kind in KINDS:
        modules = kind.modules(decoder, layer)
        if modules is None:
            continue
        if why := _why_unsuited(kind, decoder, modules, linears, kernel):
            return why
        own = {**linears}
        if kernel.sums is not None and not kernel.sums.is_first:
            own |= {one: replace(linears[one], bias=None) for one in modules.added}
        found = kind.parts(modules, own, kernel)
        return found if isinstance(found, str) else LayerOperator(modules, *found, kernel)
    return None


def _why_unsuited(
    kind: LayerKind, decoder: Any, modules: KindModules, linears: Mapping[nn.Module, Linear],
    kernel: StreamingLinear,
) -> str:  # fmt: skip
    """Why the products and norms of a layer cannot be computed here; or ""."""
    if kernel.dtype != torch.bfloat16:
        return f"{kind.about} is computed here in bfloat16 only (--dtype bfloat16)"
    if getattr(decoder, "aux_hidden_state_layers", ()):
        return "a drafter reads hidden states between layers"
    if why := kind.why_unknown(modules):
        return why
    if any(base_layer(one) is not one for one in (*modules.linears, *modules.divided)):
        return f"{kind.about} with adapters is left to vLLM"
    if any(one not in linears for one in modules.linears):
        return "vLLM's own kernels compute linear layers of it"
    for norm in modules.norms:
        if as_norm(norm) is None:
            return f"a norm is another one ({type(norm).__name__})"
    return why_not_added(modules.divided, modules.added, kernel.sums)

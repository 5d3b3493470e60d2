"""Layers with multi-head latent attention on a CPU rank, up to their experts or MLP.

A decode step of such a layer is one native call (csrc/kernels/latent_layer.h): the norm before the
attention, its products, the rotation, the latent that is cached, the attention of all heads to the
cached latents, and the norm behind it.  Any other step (prompts, more tokens than a step has) is
computed by vLLM's own module between the two norms.  The module stays what it is, and vLLM finds
its attention where it has registered it.

Each rank of a tensor-parallel group has some of the heads; all cache the same latents.  What their
heads have attended to is added up inside of the call (rank_sums.py), the experts behind it by vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention.attention import get_attention_context

from ray_hetero.compat.models.latent_attention import blocks_of_tokens
from ray_hetero.kernels import step_trace
from ray_hetero.kernels.custom_ops import register_op
from ray_hetero.kernels.formats import HostWeight
from ray_hetero.kernels.layers import layer_tokens
from ray_hetero.kernels.layers.fused_modules import LatentAttentionRun
from ray_hetero.kernels.layers.layer_parts import Linear, Norm, PostAttention
from ray_hetero.kernels.layers.post_attention import add_and_norm, input_norm, results_like
from ray_hetero.kernels.linear.rank_sums import meeting
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.kernels.step_route import Place, Reason
from ray_hetero.kernels.step_trace import Event

BLOCK_MULTIPLE = 16
"""Divisor of the tokens of a KV block: a tile's."""

_library = torch.library.Library("ray_hetero", "FRAGMENT")
_layers: list[LatentLayer] = []
"""Layers of this process, by the number that the operator is called with."""


@dataclass(frozen=True)
class LatentShape:
    """Heads of a multi-head latent attention, and elements of their parts."""

    heads: int
    latent: int
    """Elements cached of a token, which are read as keys and as values."""
    rotated: int
    """Elements of keys and queries that are rotated."""
    plain: int
    """The other part of a head's queries."""
    value: int

    @property
    def cached(self) -> int:
        """Elements of a token in the cache."""
        return self.latent + self.rotated


@dataclass(frozen=True, eq=False)
class LatentParts:
    """The parts of a layer with multi-head latent attention."""

    shape: LatentShape
    norm: Norm
    """Norm of the attention's input."""
    down: Linear
    """Layer for the latent of queries, if they have one, the latent and the keys' rotated part."""
    query_norm: Norm | None
    """Norm of the latent of queries; None where queries have none."""
    queries: Linear
    latent_norm: Norm
    cos_sin: torch.Tensor
    """[positions, rotated], bf16: cosines, then sines."""
    is_interleaved: bool
    """Whether neighbours turn together; else halves of the rotated part do."""
    to_latent: HostWeight
    """[heads · latent, plain]."""
    from_latent: HostWeight
    """[heads · value, latent]."""
    scale: float
    behind: PostAttention
    """The output projection and the norm behind it."""

    def native(self, module: ModuleType, sums: Any = None) -> Any:
        """The native module's object.

        Args:
            module: the native module.
            sums: its object of the group whose ranks have parts of the heads, if any.

        """
        shape = self.shape
        rotation = module.Rotation(
            heads=1, kv_heads=1, size=shape.rotated, cos_sin=self.cos_sin.data_ptr(),
            positions=self.cos_sin.shape[0], rotated=self.cos_sin.shape[1],
            is_interleaved=self.is_interleaved, query_norm=None, key_norm=None,
        )  # fmt: skip
        to_latent, from_latent = (
            (one.data.data_ptr(), one.encoding) for one in (self.to_latent, self.from_latent)
        )
        return module.LatentLayer(
            shape=(shape.heads, shape.latent, shape.rotated, shape.plain, shape.value),
            norm=self.norm.native,
            down=self.down.native,
            query_norm=None if self.query_norm is None else self.query_norm.native,
            queries=self.queries.native,
            latent_norm=self.latent_norm.native,
            rotation=rotation,
            to_latent=to_latent,
            from_latent=from_latent,
            scale=self.scale,
            behind=self.behind.native(module, sums),
        )


@dataclass(frozen=True, eq=False)
class StepRequests:
    """The tokens of a step as requests of one token each, the same for all layers."""

    metadata: Any
    """vLLM's of the step, which is one object for all layers."""
    positions: torch.Tensor
    """[tokens], int64."""
    slots: torch.Tensor
    """[tokens], int64."""
    lengths: torch.Tensor
    """[tokens], int32, with the token itself."""
    blocks: torch.Tensor
    """[tokens, most blocks], int32."""
    shape: tuple[int, int]
    """Blocks of a cache, and tokens of each."""
    native: Any
    """The native module's object, which points at these."""

    @classmethod
    def of(
        cls, metadata: Any, positions: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor,
        module: ModuleType,
    ) -> StepRequests | None:  # fmt: skip
        """Requests of a step; None if vLLM describes it in another way than is known here.

        Args:
            metadata: vLLM's.
            positions: [tokens], int64.
            slots: [tokens] and more.
            cache: of a layer, [blocks, tokens of a block, elements].
            module: the native module.

        """
        tokens, (count, block, _) = len(positions), cache.shape
        if slots.dtype != torch.int64 or slots.stride(0) != 1 or len(slots) < tokens:
            return None
        blocks = blocks_of_tokens(metadata, tokens, block)
        if blocks is None:
            return None
        lengths = (positions + 1).to(torch.int32)
        native = module.Requests(
            m=tokens, positions=positions.data_ptr(), slots=slots.data_ptr(),
            lengths=lengths.data_ptr(), blocks=blocks.data_ptr(), most_blocks=blocks.stride(0),
            block=block, cache_blocks=count, tiles=False, are_latents=True,
        )  # fmt: skip
        return cls(metadata, positions, slots, lengths, blocks, (count, block), native)

    def is_of(self, metadata: Any, positions: torch.Tensor, cache: torch.Tensor) -> bool:
        """Whether these are the requests of a layer in a step."""
        return (
            self.metadata is metadata
            and self.positions.data_ptr() == positions.data_ptr()
            and len(self.positions) == len(positions)
            and self.shape == tuple(cache.shape[:2])
        )


_step: list[StepRequests] = []
"""The last one, for the next layer of the same step."""


class LatentLayer:
    """Computes a layer up to what its MLP or its experts are given.

    Args:
        parts: of the layer.
        name: of its attention, in vLLM's forward context.
        attention: vLLM's module, for steps that are not computed here.
        kernel: what computes linear layers.

    """

    def __init__(
        self, parts: LatentParts, name: str, attention: Any, kernel: StreamingLinear
    ) -> None:
        self.parts = parts
        self._name = name
        self._attention = attention
        self._kernel = kernel
        self._native = parts.native(kernel.native, kernel.sums and kernel.sums.native)

    def replacement(self, mlp: Any) -> nn.Module:
        """Module that takes the layer's place in vLLM's model, before `mlp`."""
        return LatentAttentionRun(register(self), mlp)

    def __call__(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layer from its input to that of its MLP or experts.

        Args:
            positions: [M].
            hidden: [M, N], bf16.
            residual: [M, N], bf16; None at the beginning of a model.

        Returns:
            [M, N], and the new residual [M, N].

        """
        positions = positions.to(torch.int64).contiguous()
        step = self._decode_step(positions, hidden, residual)
        native = 0 if step is None else len(positions)
        layer_tokens.count(1, native=native, by_operators=len(positions) - native)
        return self._by_operators(positions, hidden, residual) if step is None else step

    def _decode_step(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The same in one native call, or None if this step is something else."""
        metadata, _, cache, slots = get_attention_context(self._name)
        if metadata is None:
            return None
        route = self._kernel.route_of(len(positions), metadata.max_query_len)
        step_trace.note(Event.ROUTE, route)
        if route.place is not Place.NATIVE:
            return None
        if not (_step and _step[0].is_of(metadata, positions, cache)):
            made = None
            if slots is not None and self._is_known(cache):
                made = StepRequests.of(metadata, positions, slots, cache, self._kernel.native)
            if made is None:
                layer_tokens.count_instead(Reason.UNKNOWN_ATTENTION)
                return None
            _step[:] = [made]
        hidden = hidden.contiguous()
        residual = None if residual is None else residual.contiguous()
        y, total = torch.empty_like(hidden), torch.empty_like(hidden)
        with meeting(self._kernel.sums):
            self._native.run(
                requests=_step[0].native,
                cache=(cache.data_ptr(), cache.stride(0), cache.stride(1)),
                hidden=hidden.data_ptr(),
                residual=0 if residual is None else residual.data_ptr(),
                y=y.data_ptr(),
                sum=total.data_ptr(),
                level=self._kernel.level,
            )
        return y, total

    def _is_known(self, cache: torch.Tensor) -> bool:
        """[blocks, tokens of a block, latent and rotated part], tokens row by row."""
        return bool(
            cache.dtype == torch.bfloat16
            and cache.ndim == 3
            and cache.shape[1] % BLOCK_MULTIPLE == 0
            and cache.shape[2] == self.parts.shape.cached
            and cache.stride(2) == 1
        )

    def _by_operators(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self.parts
        x, total = input_norm(hidden, residual, parts.norm)
        attended = self._attention(positions, x, None)
        return add_and_norm(attended, total, parts.behind.norm), total


def _latent_layer(
    positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _layers[layer](positions, hidden, residual)


def _shapes(
    positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return results_like(hidden)


def register(layer: LatentLayer) -> int:
    """Register a layer with the operator; returns the number that it is called with."""
    _layers.append(layer)
    return len(_layers) - 1


register_op(_library, "latent_layer", _latent_layer, _shapes)

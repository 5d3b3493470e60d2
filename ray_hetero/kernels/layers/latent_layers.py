"""Layers with multi-head latent attention on a CPU rank, as a kind of layers (kinds.py).

A decode step of such a layer is one native call (csrc/kernels/latent_layer.h): the norm before the
attention, its products, the rotation, the latent that is cached, the attention of all heads to the
cached latents, and the norm behind it.  All ranks of a group cache the same latents.  The MLP or
the experts stay vLLM's module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import (
    DeepseekScalingRotaryEmbedding,
)

from ray_hetero.compat.models import latent_attention
from ray_hetero.compat.models.decoder_classes import has_forward_of
from ray_hetero.kernels.formats import HostWeight
from ray_hetero.kernels.formats.base import BLOCK
from ray_hetero.kernels.layers.attention import as_norm, is_neox
from ray_hetero.kernels.layers.decode_step import (
    IsNative,
    NativeStep,
    StepOf,
    StepRequests,
)
from ray_hetero.kernels.layers.latent_heads import LatentShape, head_weights_of
from ray_hetero.kernels.layers.layer_parts import Linear, Norm, PostAttention
from ray_hetero.kernels.layers.structures import is_made_of
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.kernels.step_route import Reason

BLOCK_MULTIPLE = 16
"""Divisor of the tokens of a KV block: a tile's."""
ROTATED_MULTIPLE = 16
"""Divisor of the number of elements of a rotated part: a vector's elements."""
ROTATIONS = (RotaryEmbedding.forward_native, DeepseekScalingRotaryEmbedding.forward_native)
"""Rotations by one table of cosines and sines, which may be scaled."""


@dataclass(frozen=True)
class LatentModules:
    """vLLM's modules of a layer with multi-head latent attention, by the part that each is."""

    input_norm: Any
    """Norm of the attention's input."""
    down: Any
    """Layer for the latent of queries, if they have one, the latent and the keys' rotated part."""
    query_norm: Any
    """Norm of the latent of queries; None where queries are made of the hidden state."""
    queries: Any
    """Layer for the queries of all heads, each a plain part and a rotated one."""
    latent_norm: Any
    rotary: Any
    """Rotary embedding that turns the rotated parts by their positions."""
    wrapper: Any
    """vLLM's module around these products and the attention, and the one that is below."""
    attend: Any
    """vLLM's `MLAAttention`."""
    output: Any
    """Linear layer that the attention's results are multiplied with."""
    norm: Any
    """Norm of the input of the MLP or the experts."""
    mlp: Any
    """MLP or experts, which stay vLLM's module."""
    attention: Any
    """All from `down` to `output` in one module of vLLM's."""

    @property
    def linears(self) -> tuple[Any, Any, Any]:
        """Linear layers in the order of their products."""
        return self.down, self.queries, self.output

    @property
    def divided(self) -> tuple[Any, Any]:
        """Linear layers of which each rank of a group has a part."""
        return self.queries, self.output

    @property
    def added(self) -> tuple[Any]:
        """Linear layers whose products the ranks of a group add up."""
        return (self.output,)

    @property
    def norms(self) -> tuple[Any, ...]:
        """All norms of tokens."""
        own = (self.input_norm, self.latent_norm, self.norm)
        return own if self.query_norm is None else (*own, self.query_norm)

    def attended(self, positions: Any, x: Any) -> Any:
        """All between the two norms of tokens, computed by vLLM's module."""
        return self.attention(positions, x, None)


def latent_modules(model: Any, layer: Any) -> LatentModules | None:
    """The modules of a layer of a model of vLLM's; None if it computes something else."""
    parts = {"self_attn": ("DeepseekV2MLAAttention",)}
    if (
        not has_forward_of(model, "DeepseekV2Model")
        or not is_made_of(layer, ("DeepseekV2DecoderLayer",), parts)
        or layer.use_mha
        or layer.use_sequence_parallel_moe
        # Queries are multiplied with something that depends on their positions.
        or getattr(model.config, "llama_4_scaling", None) is not None
    ):
        return None
    wrapper = layer.self_attn.mla_attn
    has_latent = wrapper.q_lora_rank is not None
    return LatentModules(
        input_norm=layer.input_layernorm,
        down=wrapper.fused_qkv_a_proj if has_latent else wrapper.kv_a_proj_with_mqa,
        query_norm=wrapper.q_a_layernorm if has_latent else None,
        queries=wrapper.q_b_proj if has_latent else wrapper.q_proj,
        latent_norm=wrapper.kv_a_layernorm,
        rotary=wrapper.rotary_emb,
        wrapper=wrapper,
        attend=wrapper.mla_attn,
        output=wrapper.o_proj,
        norm=layer.post_attention_layernorm,
        mlp=layer.mlp,
        attention=layer.self_attn,
    )


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
class LatentStep:
    """The tokens of a step as requests of one token each, the same for all layers."""

    metadata: Any
    """vLLM's of the step, which is one object for all layers."""
    requests: StepRequests
    shape: tuple[int, int]
    """Blocks of a cache, and tokens of each."""
    native: Any
    """The native module's object of the requests."""

    @classmethod
    def of(
        cls, metadata: Any, positions: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor,
        module: ModuleType,
    ) -> LatentStep | None:  # fmt: skip
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
        blocks = latent_attention.blocks_of_tokens(metadata, tokens, block)
        if blocks is None:
            return None
        requests = StepRequests(positions, slots, (positions + 1).to(torch.int32), blocks)
        native = requests.native(module, cache, None)
        return cls(metadata, requests, (count, block), native)

    def is_of(self, metadata: Any, positions: torch.Tensor, cache: torch.Tensor) -> bool:
        """Whether these are the requests of a layer in a step."""
        return (
            self.metadata is metadata
            and self.requests.positions.data_ptr() == positions.data_ptr()
            and len(self.requests.positions) == len(positions)
            and self.shape == tuple(cache.shape[:2])
        )


class Latents:
    """Layers with multi-head latent attention, as a `LayerKind`."""

    about = "latent attention"

    def __init__(self) -> None:
        self._last: LatentStep | None = None
        """The last step, for the next layer of the same one."""

    def modules(self, decoder: Any, layer: Any) -> LatentModules | None:
        """The modules of a layer; None if it is of another kind."""
        return latent_modules(decoder, layer)

    def why_unknown(self, modules: LatentModules) -> str:
        """Why the attention of a layer cannot be computed here; or ""."""
        if why := latent_attention.why_unknown(modules.wrapper):
            return why
        attend, rotary = modules.attend, modules.rotary
        rotated = attend.qk_rope_head_dim
        if (
            getattr(type(rotary), "forward_native", None) not in ROTATIONS
            or rotary.rotary_dim != rotated
            or rotary.cos_sin_cache.shape[1] != rotated
        ):
            return f"positions are another rotation ({type(rotary).__name__})"
        sizes = (attend.kv_lora_rank, attend.qk_nope_head_dim, attend.v_head_dim,
                 attend.kv_lora_rank + rotated)  # fmt: skip
        if any(size % BLOCK for size in sizes) or rotated % ROTATED_MULTIPLE:
            return (
                f"latents and parts of heads have {sizes} elements, expected multiples of {BLOCK}"
            )
        return ""

    def parts(
        self, modules: LatentModules, linears: Mapping[nn.Module, Linear], kernel: StreamingLinear
    ) -> tuple[LatentParts, StepOf] | str:
        """A layer's parts and steps, as `LayerKind` says."""
        attend = modules.attend
        shape = LatentShape(
            heads=int(modules.wrapper.num_heads), latent=int(attend.kv_lora_rank),
            rotated=int(attend.qk_rope_head_dim), plain=int(attend.qk_nope_head_dim),
            value=int(attend.v_head_dim),
        )  # fmt: skip
        weights = head_weights_of(attend, shape, kernel)
        if isinstance(weights, str):
            return weights
        down, queries, output = (linears[one] for one in modules.linears)
        own_norm, latent_norm, norm = (
            as_norm(one) for one in (modules.input_norm, modules.latent_norm, modules.norm)
        )
        assert own_norm is not None
        assert latent_norm is not None
        assert norm is not None
        parts = LatentParts(
            shape=shape, norm=own_norm, down=down, query_norm=as_norm(modules.query_norm),
            queries=queries, latent_norm=latent_norm,
            cos_sin=modules.rotary.cos_sin_cache.to(torch.bfloat16).contiguous(),
            is_interleaved=not is_neox(modules.rotary), to_latent=weights[0],
            from_latent=weights[1], scale=float(attend.impl.scale),
            behind=PostAttention(output, norm),
        )  # fmt: skip

        def step_of(
            positions: torch.Tensor, tokens: int, is_native: IsNative
        ) -> NativeStep | Reason | None:
            """Requests and cache of the running step, as `StepOf` says."""
            metadata, _, cache, slots = get_attention_context(attend.layer_name)
            if metadata is None or not is_native(metadata.max_query_len):
                return None
            step = self._last
            if step is None or not step.is_of(metadata, positions, cache):
                if slots is None or not _is_known(cache, shape):
                    return Reason.UNKNOWN_ATTENTION
                step = LatentStep.of(metadata, positions, slots, cache, kernel.native)
                if step is None:
                    return Reason.UNKNOWN_ATTENTION
                self._last = step
            at = cache.data_ptr(), cache.stride(0), cache.stride(1)
            return NativeStep({"requests": step.native, "cache": at}, step)

        return parts, step_of


def _is_known(cache: torch.Tensor, shape: LatentShape) -> bool:
    """[blocks, tokens of a block, latent and rotated part], tokens row by row."""
    return bool(
        cache.dtype == torch.bfloat16
        and cache.ndim == 3
        and cache.shape[1] % BLOCK_MULTIPLE == 0
        and cache.shape[2] == shape.cached
        and cache.stride(2) == 1
    )

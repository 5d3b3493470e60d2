"""The attention of a decoder layer on a CPU rank, from queries, keys and values on.

What is computed here is the rotation; keys and values are written, and attended to, by vLLM's
module, which vLLM finds where it has registered it.  A decode step does all of it in
csrc/kernels/attention.h (decode_step.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention as VllmAttention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, LayerNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope import (
    Phi3LongRoPEScaledRotaryEmbedding,
)
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from ray_hetero.kernels.layers.layer_parts import AttentionShape, Norm, Scores
from ray_hetero.kernels.layers.structures import LayerModules
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear

HEAD_MULTIPLE = 16
"""Divisor of a head's size: a vector's elements."""
SPAN = 32
"""Divisor of a head's size and of a block's tokens: what csrc/kernels/attention.h takes at once."""


class Attention:
    """The attention from queries, keys and values to what the output projection multiplies.

    Args:
        modules: of a layer whose attention `why_unsuited` says nothing of.
        kernel: what computes linear layers.

    """

    def __init__(self, modules: LayerModules, kernel: StreamingLinear) -> None:
        attend = modules.attend
        self.name: str = attend.layer_name
        self.scores = known_scores(attend)
        """Treatment of the scores; None if it is more than csrc/kernels/attention.h can do."""
        self._head = int(attend.head_size)
        self.shape = AttentionShape(attend.num_heads, attend.num_kv_heads, self._head)
        self._sizes = [self.shape.queries, self.shape.keys, self.shape.keys]
        angles = cos_sin_of(modules.rotary)
        assert angles is not None
        self.cos_sin = angles.to(kernel.dtype).contiguous()
        """[positions, rotated elements of a head]: cosines, then sines; nothing is rotated in
        models without positions here."""
        self._is_interleaved = modules.rotary is not None and not is_neox(modules.rotary)
        self.norms = [norm for norm in map(as_norm, modules.head_norms) if norm is not None]
        """Norms of the heads of queries and of keys; none in most models."""
        self._level = kernel.level
        self.rotation = kernel.native.Rotation(
            heads=self.shape.heads,
            kv_heads=self.shape.kv_heads,
            size=self._head,
            cos_sin=self.cos_sin.data_ptr(),
            positions=self.cos_sin.shape[0],
            rotated=self.cos_sin.shape[1],
            is_interleaved=self._is_interleaved,
            query_norm=self.norms[0].native if self.norms else None,
            key_norm=self.norms[1].native if self.norms else None,
        )

    @property
    def is_plain(self) -> bool:
        """Whether a GPU that computes prompts can attend as this does (gpu_layers.py)."""
        return (
            self.scores is not None
            and self.scores.is_plain
            and self.cos_sin.shape[1] > 0
            and not self._is_interleaved
        )

    def __call__(self, positions: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        """Write keys and values into the cache, and attend.

        Args:
            positions: [M], int64.
            qkv: [M, queries + keys + values], bf16; normalised and rotated in place.

        Returns:
            [M, queries], bf16.

        """
        tokens, stride = len(qkv), qkv.stride(0)
        self.rotation.run(qkv.data_ptr(), stride, positions.data_ptr(), tokens, self._level)
        queries, keys, values = qkv.split(self._sizes, dim=-1)
        metadata, attention, cache, slots = get_attention_context(self.name)
        if metadata is None:
            # A dummy run; vLLM attends to nothing either.
            return torch.zeros_like(queries, memory_format=torch.contiguous_format)
        queries, keys, values = (x.view(len(x), -1, self._head) for x in (queries, keys, values))
        if slots is not None:
            attention.impl.do_kv_cache_update(attention, keys, values, cache, slots)
        attended = torch.empty_like(queries, memory_format=torch.contiguous_format)
        attention.impl.forward(attention, queries, keys, values, cache, metadata, attended)
        return attended.view(tokens, -1)


def why_unsuited(modules: LayerModules) -> str:
    """Why the attention of a layer cannot be computed here; or ""."""
    attend, rotary = modules.attend, modules.rotary
    if (
        type(attend) is not VllmAttention
        or attend.query_quant is not None
        or attend.kv_sharing_target_layer_name is not None
        or attend.head_size_v != attend.head_size
        or attend.attn_backend.forward_includes_kv_cache_update
    ):
        return f"the attention is another one ({type(attend).__name__})"
    if attend.head_size % HEAD_MULTIPLE:
        return f"heads have {attend.head_size} elements, expected a multiple of {HEAD_MULTIPLE}"
    angles = cos_sin_of(rotary)
    if angles is None or angles.shape[1] % 2:
        return f"positions are another rotation ({type(rotary).__name__})"
    if any(as_norm(norm) is None for norm in modules.head_norms):
        return "heads have another norm"
    return ""


def cos_sin_of(rotary: Any) -> torch.Tensor | None:
    """The table of a rotation [positions, rotated elements]; None if it is not one of those known.

    Without a rotation there are no rotated elements.
    """
    if rotary is None:
        return torch.empty(0, 0)
    if type(rotary) is Phi3LongRoPEScaledRotaryEmbedding:
        # One of the two is chosen when the engine starts, by its longest request.
        table, short = rotary.long_short_cos_sin_cache, rotary.original_max_position_embeddings
        return table[short:] if rotary.use_long_rope else table[:short]
    if getattr(type(rotary), "forward_native", None) is RotaryEmbedding.forward_native:
        found: torch.Tensor = rotary.cos_sin_cache
        return found
    return None


def is_neox(rotary: Any) -> bool:
    """Whether halves of what is rotated turn together; else neighbours do."""
    return bool(getattr(rotary, "is_neox_style", True))


def as_norm(module: Any, *, of_rounded: bool = False) -> Norm | None:
    """A norm of vLLM's or torch's, if it is one of those known here.

    Args:
        module: of any class.
        of_rounded: whether a sum is rounded before its norm is taken.

    """
    weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
    if (
        weight is None
        or weight.dtype not in {torch.bfloat16, torch.float16}
        or (bias is not None and bias.dtype != weight.dtype)
    ):
        return None
    if type(module) is RMSNorm and module.has_weight and module.variance_size_override is None:
        return Norm(weight.data, float(module.variance_epsilon), of_rounded=of_rounded)
    if type(module) is GemmaRMSNorm:
        epsilon = float(module.variance_epsilon)
        return Norm(weight.data, epsilon, "rms_plus_one", of_rounded=of_rounded)
    if type(module) in {LayerNorm, nn.LayerNorm}:
        own = None if bias is None else bias.data
        return Norm(weight.data, float(module.eps), "layer", own, of_rounded)
    return None


def known_scores(attend: Any) -> Scores | None:
    """Transformation of an attention's scores; None if csrc/kernels/attention.h lacks it."""
    impl = attend.impl
    is_known = (
        type(impl) is CPUAttentionBackendImpl
        and impl.attn_type == AttentionType.DECODER
        and impl.alibi_slopes is None
        and not impl.is_fp8_kv_cache
        and attend.head_size % SPAN == 0
    )
    if not is_known:
        return None
    return Scores(
        scale=float(impl.scale),
        window=None if impl.sliding_window < 0 else int(impl.sliding_window),
        soft_cap=float(impl.logits_soft_cap),
        sinks=None if impl.sinks is None else impl.sinks.data.float().contiguous(),
    )

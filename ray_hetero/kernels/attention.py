"""The attention of a decoder layer on a CPU rank, from queries, keys and values on.

What is computed here is the rotation; keys and values are written, and attended to, by vLLM's
module, which vLLM finds where it has registered it.  A decode step does all of it in
csrc/kernels/attention.h (decode_step.py).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention as VllmAttention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from ray_hetero.kernels.gpu_layers import AttentionShape
from ray_hetero.kernels.layer_parts import Norm
from ray_hetero.kernels.streaming_linear import StreamingLinear
from ray_hetero.kernels.structures import LayerModules

HEAD_MULTIPLE = 16
"""Of a head's size, and of half of what is rotated of it; a vector's."""
SPAN = 32
"""Of a head's size and a block's tokens: what csrc/kernels/attention.h takes at once."""


class Attention:
    """From queries, keys and values to what the output projection multiplies.

    Args:
        modules: of a layer whose attention `why_unsuited` says nothing of.
        kernel: what computes linear layers.

    """

    def __init__(self, modules: LayerModules, kernel: StreamingLinear) -> None:
        attend = modules.attend
        self.name: str = attend.layer_name
        self.scale = known_scale(attend)
        """Of scores; None if an attention does more than csrc/kernels/attention.h does."""
        self._head = int(attend.head_size)
        self.shape = AttentionShape(attend.num_heads, attend.num_kv_heads, self._head)
        self._sizes = [self.shape.queries, self.shape.keys, self.shape.keys]
        self.cos_sin = modules.rotary.cos_sin_cache.to(torch.bfloat16).contiguous()
        """[positions, rotated elements of a head]: cosines, then sines."""
        self.norms = [norm for norm in map(as_norm, modules.head_norms) if norm is not None]
        """Of heads of queries and of keys; none in most models."""
        self._level = kernel.level
        self.rotation = kernel.native.Rotation(
            heads=self.shape.heads,
            kv_heads=self.shape.kv_heads,
            size=self._head,
            cos_sin=self.cos_sin.data_ptr(),
            positions=self.cos_sin.shape[0],
            rotated=self.cos_sin.shape[1],
            query_norm=self.norms[0].native if self.norms else None,
            key_norm=self.norms[1].native if self.norms else None,
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
    if (
        type(rotary).forward_native is not RotaryEmbedding.forward_native
        or not rotary.is_neox_style
        or rotary.cos_sin_cache.shape[1] % (2 * HEAD_MULTIPLE)
    ):
        return f"positions are another rotation ({type(rotary).__name__})"
    if any(as_norm(norm) is None for norm in modules.head_norms):
        return "heads have another norm"
    return ""


def as_norm(norm: Any) -> Norm | None:
    """A norm of vLLM's, if it is one of those known here."""
    if type(norm) is not RMSNorm or not norm.has_weight:
        return None
    weight = norm.weight.data
    if norm.variance_size_override is not None or weight.dtype != torch.bfloat16:
        return None
    return Norm(weight, float(norm.variance_epsilon))


def known_scale(attend: Any) -> float | None:
    """Scale of an attention's scores; None if it does more than csrc/kernels/attention.h does."""
    impl = attend.impl
    is_known = (
        type(impl) is CPUAttentionBackendImpl
        and impl.attn_type == AttentionType.DECODER
        and impl.alibi_slopes is None
        and impl.sliding_window == -1
        and not impl.logits_soft_cap
        and impl.sinks is None
        and not impl.is_fp8_kv_cache
        and attend.head_size % SPAN == 0
    )
    return float(impl.scale) if is_known else None

"""A model of parts that are known to decoder_layers.py, with an attention that can be followed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from native_module import native
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from ray_hetero.kernels.post_attention import Linear
from ray_hetero.weight_formats import CompactWeight, PackedWeight
from ray_hetero.weight_formats.base import pack

HEADS, KV_HEADS, HEAD = 6, 2, 64
HIDDEN, WIDE = 256, 416
POSITIONS = 8448
EPSILON = 1e-5


def named(name: str, **parts: Any) -> Any:
    made = type(name, (torch.nn.Module,), {})()
    for key, value in parts.items():
        setattr(made, key, value)
    return made


class RMSNorm(torch.nn.Module):
    has_weight = True
    variance_size_override = None
    variance_epsilon = EPSILON

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(size).add_(0.5).bfloat16(), requires_grad=False)

    def forward(self, x: Any, residual: Any = None) -> Any:
        total = x.float() if residual is None else x.float() + residual.float()
        scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + EPSILON)
        normed = (total * scale).bfloat16() * self.weight
        return normed if residual is None else (normed, total.bfloat16())


class Product(torch.nn.Module):
    tp_size = 1

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.matrix = torch.randn(outputs, inputs).mul_(inputs**-0.5).bfloat16()

    def forward(self, x: Any) -> Any:
        return (x.float() @ self.matrix.float().T).bfloat16(), None


class SiluAndMul(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        gate, up = x.float().chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).bfloat16()


def rotary(rotated: int) -> Any:
    # Its own beginning wants the configuration of an engine.
    made = RotaryEmbedding.__new__(RotaryEmbedding)
    torch.nn.Module.__init__(made)
    made.head_size, made.rotary_dim, made.max_position_embeddings = HEAD, rotated, POSITIONS
    made.base, made.is_neox_style, made.use_aiter = 10000.0, True, False
    made.register_buffer("cos_sin_cache", made._compute_cos_sin_cache().bfloat16())
    made._forward_method = made.forward_native
    return made


class Attended(torch.nn.Module):
    """In the place of vLLM's `Attention`: a mixture of all that it is given."""

    query_quant = kv_sharing_target_layer_name = None
    head_size = head_size_v = HEAD
    attn_backend = SimpleNamespace(forward_includes_kv_cache_update=False)

    def __init__(self, layer_name: str) -> None:
        super().__init__()
        self.layer_name = layer_name
        self.impl = SimpleNamespace(
            do_kv_cache_update=self.write, forward=self.attend, written=None
        )

    def write(self, layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
        assert (layer, cache, slots) == (self, "cache", "slots")
        self.impl.written = keys.clone(), values.clone()

    def attend(
        self, layer: Any, queries: Any, keys: Any, values: Any, cache: Any, metadata: Any, out: Any
    ) -> None:
        assert (layer, cache, metadata) == (self, "cache", "metadata")
        assert all(map(torch.equal, self.impl.written, (keys, values)))
        each = HEADS // KV_HEADS
        keys, values = (x.repeat_interleave(each, dim=1) for x in (keys, values))
        out.copy_(queries - 0.5 * keys + 0.25 * values)

    def forward(self, queries: Any, keys: Any, values: Any) -> Any:
        queries, keys, values = (x.reshape(len(x), -1, HEAD) for x in (queries, keys, values))
        self.impl.written = keys, values
        out = torch.empty_like(queries)
        self.attend(self, queries, keys, values, "cache", "metadata", out)
        return out.view(len(out), -1)


Attended.__name__ = "Attention"


def attention(
    name: str, number: int = 0, *, rotated: int = HEAD, heads: int = HEADS, kv_heads: int = KV_HEADS
) -> Any:
    queries, keys = heads * HEAD, kv_heads * HEAD
    norms = {"q_norm": RMSNorm(HEAD), "k_norm": RMSNorm(HEAD)} if name == "Qwen3Attention" else {}
    return named(
        name, qkv_proj=Product(queries + 2 * keys, HIDDEN), o_proj=Product(HIDDEN, queries),
        rotary_emb=rotary(rotated), attn=Attended(f"layers.{number}"), q_size=queries,
        kv_size=keys, head_dim=HEAD, qk_norm=False, **norms,
    )  # fmt: skip


def model(
    layers: int, *, model: str = "LlamaModel", layer: str = "LlamaDecoderLayer",
    attends: str = "LlamaAttention", heads: int = HEADS, kv_heads: int = KV_HEADS,
) -> Any:  # fmt: skip
    def one(number: int) -> Any:
        return named(
            layer, input_layernorm=RMSNorm(HIDDEN),
            self_attn=attention(attends, number, heads=heads, kv_heads=kv_heads),
            post_attention_layernorm=RMSNorm(HIDDEN),
            mlp=named(
                "LlamaMLP", gate_up_proj=Product(2 * WIDE, HIDDEN), act_fn=SiluAndMul(),
                down_proj=Product(HIDDEN, WIDE),
            ),
        )  # fmt: skip

    missing = named("PPMissingLayer")
    stages = torch.nn.ModuleList([missing, *map(one, range(layers)), missing])
    return named(model, layers=stages, start_layer=1, end_layer=1 + layers)


def linears(model: Any) -> dict[Any, Linear]:
    def held(matrix: Any) -> Linear:
        kind = CompactWeight if len(matrix) == HIDDEN else PackedWeight
        weight = kind.made(pack(matrix), native)
        assert weight is not None
        return Linear(weight, None)

    return {module: held(module.matrix) for module in model.modules()
            if isinstance(module, Product)}  # fmt: skip

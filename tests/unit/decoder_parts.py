"""Models of vLLM's own classes, made without an engine, with an attention that can be followed."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from native_module import native
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from ray_hetero.compat import decoder_classes
from ray_hetero.kernels import layer_fusion
from ray_hetero.kernels.decoder_layers import Layer
from ray_hetero.kernels.layer_parts import Linear
from ray_hetero.kernels.streaming_linear import StreamingLinear
from ray_hetero.kernels.structures import STRUCTURES
from ray_hetero.weight_formats import CompactWeight, PackedWeight
from ray_hetero.weight_formats.base import pack

HEADS, KV_HEADS, HEAD = 6, 2, 64
HIDDEN, WIDE = 256, 416
POSITIONS = 8448
EPSILON = 1e-5


def class_of(name: str) -> Any:
    """A class of vLLM's by its name."""
    for file, names in decoder_classes.CLASSES.items():
        if name in names:
            return getattr(importlib.import_module(f"{decoder_classes.MODELS}.{file}"), name)
    raise AssertionError(f"{name} is not in decoder_classes.py")


def bare(cls: Any, **parts: Any) -> Any:
    """A module of a class whose own beginning wants the configuration of an engine."""
    made = cls.__new__(cls)
    torch.nn.Module.__init__(made)
    for key, value in parts.items():
        setattr(made, key, value)
    if hasattr(cls, "forward_native"):
        made._forward_method = made.forward_native
    return made


def rms_norm(size: int) -> Any:
    weight = torch.rand(size).add_(0.5).bfloat16()
    return bare(
        RMSNorm, weight=torch.nn.Parameter(weight, requires_grad=False), has_weight=True,
        pass_weight=True, pass_weight_add=True, variance_epsilon=EPSILON,
        variance_size_override=None, hidden_size=size,
    )  # fmt: skip


class Product(torch.nn.Module):
    tp_size = 1

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.matrix = torch.randn(outputs, inputs).mul_(inputs**-0.5).bfloat16()

    def forward(self, x: Any) -> Any:
        return (x.float() @ self.matrix.float().T).bfloat16(), None


def rotary(rotated: int) -> Any:
    made = bare(
        RotaryEmbedding, head_size=HEAD, rotary_dim=rotated, max_position_embeddings=POSITIONS,
        base=10000.0, is_neox_style=True, use_aiter=False,
    )  # fmt: skip
    made.register_buffer("cos_sin_cache", made._compute_cos_sin_cache().bfloat16())
    return made


class Attended:
    """What is computed in the place of vLLM's attention: a mixture of all that it is given."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.written: Any = None

    def write(self, layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
        assert (layer, cache, slots) == (self.layer, "cache", "slots")
        self.written = keys.clone(), values.clone()

    def attend(
        self, layer: Any, queries: Any, keys: Any, values: Any, cache: Any, metadata: Any, out: Any
    ) -> None:
        assert (layer, cache, metadata) == (self.layer, "cache", "metadata")
        assert all(map(torch.equal, self.written, (keys, values)))
        each = queries.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(each, dim=1) for x in (keys, values))
        out.copy_(queries - 0.5 * keys + 0.25 * values)

    def forward(self, queries: Any, keys: Any, values: Any) -> Any:
        queries, keys, values = (x.reshape(len(x), -1, HEAD) for x in (queries, keys, values))
        self.written = keys, values
        out = torch.empty_like(queries)
        self.attend(self.layer, queries, keys, values, "cache", "metadata", out)
        return out.view(len(out), -1)


def attended(number: int, heads: int, kv_heads: int) -> Any:
    """vLLM's attention, which computes what `Attended` does."""
    made = bare(
        Attention, layer_name=f"layers.{number}", query_quant=None,
        kv_sharing_target_layer_name=None, head_size=HEAD, head_size_v=HEAD, num_heads=heads,
        num_kv_heads=kv_heads,
        attn_backend=SimpleNamespace(forward_includes_kv_cache_update=False),
    )  # fmt: skip
    does = Attended(made)
    made.impl = SimpleNamespace(do_kv_cache_update=does.write, forward=does.attend)
    made.forward = does.forward
    return made


def attention(
    name: str, number: int = 0, *, rotated: int = HEAD, heads: int = HEADS, kv_heads: int = KV_HEADS
) -> Any:
    queries, keys = heads * HEAD, kv_heads * HEAD
    norms = {"q_norm": rms_norm(HEAD), "k_norm": rms_norm(HEAD)} if name == "Qwen3Attention" else {}
    return bare(
        class_of(name), qkv_proj=Product(queries + 2 * keys, HIDDEN),
        o_proj=Product(HIDDEN, queries), rotary_emb=rotary(rotated),
        attn=attended(number, heads, kv_heads), q_size=queries, kv_size=keys, head_dim=HEAD,
        qk_norm=False, **norms,
    )  # fmt: skip


def mlp(name: str = "LlamaMLP") -> Any:
    return bare(
        class_of(name), gate_up_proj=Product(2 * WIDE, HIDDEN), act_fn=bare(SiluAndMul),
        down_proj=Product(HIDDEN, WIDE),
    )  # fmt: skip


def model(
    layers: int, *, model: Any = "LlamaModel", layer: Any = "LlamaDecoderLayer",
    attends: str = "LlamaAttention", heads: int = HEADS, kv_heads: int = KV_HEADS,
    rotated: int = HEAD,
) -> Any:  # fmt: skip
    def one(number: int) -> Any:
        return bare(
            class_of(layer) if isinstance(layer, str) else layer,
            input_layernorm=rms_norm(HIDDEN),
            self_attn=attention(
                attends, number, rotated=rotated, heads=heads, kv_heads=kv_heads
            ),
            post_attention_layernorm=rms_norm(HIDDEN), mlp=mlp(),
        )  # fmt: skip

    missing = torch.nn.Identity()
    stages = torch.nn.ModuleList([missing, *map(one, range(layers)), missing])
    cls = class_of(model) if isinstance(model, str) else model
    return bare(cls, layers=stages, start_layer=1, end_layer=1 + layers)


def known_layers(model: Any, linears: dict[Any, Linear], kernel: StreamingLinear) -> list[Layer]:
    """The parts of a model's layers, all of which are known."""
    structure = next(one for one in STRUCTURES if one.is_model(model))
    found = [layer_fusion.layer_of(structure, layer, linears, kernel)
             for layer in list(model.layers)[model.start_layer : model.end_layer]]  # fmt: skip
    assert not [why for why in found if isinstance(why, str)]
    return [layer for layer in found if isinstance(layer, Layer)]


def linears(model: Any) -> dict[Any, Linear]:
    def held(matrix: Any) -> Linear:
        kind = CompactWeight if len(matrix) == HIDDEN else PackedWeight
        weight = kind.made(pack(matrix), native)
        assert weight is not None
        return Linear(weight, None)

    return {module: held(module.matrix) for module in model.modules()
            if isinstance(module, Product)}  # fmt: skip

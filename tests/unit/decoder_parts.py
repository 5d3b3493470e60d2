"""Models of vLLM's own classes, made without an engine, with an attention that can be followed."""

from __future__ import annotations

import functools
import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from native_module import native
from vllm.model_executor.layers.activation import GELU, GeluAndMul, SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, LayerNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from ray_hetero.compat.models import decoder_classes
from ray_hetero.kernels.formats import CompactWeight, PackedWeight
from ray_hetero.kernels.formats.base import pack
from ray_hetero.kernels.layers import fusible_layers
from ray_hetero.kernels.layers.layer import Layer
from ray_hetero.kernels.layers.layer_parts import Linear
from ray_hetero.kernels.layers.structures import Calls
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.offload import layer_fusion

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


def be_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Falcon's layers, which add their products up themselves, be those of a single rank."""
    forward = class_of("FalconDecoderLayer").forward
    monkeypatch.setitem(forward.__globals__, "tensor_model_parallel_all_reduce", lambda x: x)


DTYPE = torch.bfloat16
"""Of weights and activations."""


def bare(cls: Any, **parts: Any) -> Any:
    """A module of a class whose own beginning wants the configuration of an engine."""
    made = cls.__new__(cls)
    torch.nn.Module.__init__(made)
    for key, value in parts.items():
        setattr(made, key, value)
    if hasattr(cls, "forward_native"):
        made._forward_method = made.forward_native
    return made


def parameter(values: Any) -> Any:
    return torch.nn.Parameter(values.to(DTYPE), requires_grad=False)


def rms_norm(size: int) -> Any:
    return bare(
        RMSNorm, weight=parameter(torch.rand(size) + 0.5), has_weight=True, pass_weight=True,
        pass_weight_add=True, variance_epsilon=EPSILON, variance_size_override=None,
        hidden_size=size,
    )  # fmt: skip


def gemma_norm(size: int) -> Any:
    return bare(
        GemmaRMSNorm, weight=parameter(torch.rand(size) - 0.5), variance_epsilon=EPSILON
    )  # fmt: skip


def layer_norm(size: int) -> Any:
    return bare(
        LayerNorm, weight=parameter(torch.rand(size) + 0.5), bias=parameter(torch.randn(size) / 4),
        eps=EPSILON, normalized_shape=(size,),
    )  # fmt: skip


def torch_norm(size: int) -> Any:
    made = torch.nn.LayerNorm(size, eps=EPSILON)
    made.weight, made.bias = parameter(torch.rand(size) + 0.5), parameter(torch.randn(size) / 4)
    return made


class Product(torch.nn.Module):
    tp_size = 1
    return_bias = True
    skip_bias_add = False

    def __init__(self, outputs: int, inputs: int, *, has_bias: bool = False) -> None:
        super().__init__()
        self.output_size = outputs
        self.matrix = torch.randn(outputs, inputs).mul_(inputs**-0.5).to(DTYPE)
        self.added = torch.randn(outputs).to(DTYPE).float() if has_bias else None

    def forward(self, x: Any) -> Any:
        y = x.float() @ self.matrix.float().T
        return (y if self.added is None else y + self.added).to(DTYPE), None


@functools.cache
def angles(rotated: int) -> Any:
    """Cosines and sines of all positions, as vLLM computes them."""
    made = bare(
        RotaryEmbedding, rotary_dim=rotated, max_position_embeddings=POSITIONS, base=10000.0
    )
    return made._compute_cos_sin_cache()


def rotary(rotated: int, *, is_neox: bool = True) -> Any:
    made = bare(
        RotaryEmbedding, head_size=HEAD, rotary_dim=rotated, max_position_embeddings=POSITIONS,
        base=10000.0, is_neox_style=is_neox, use_aiter=False,
    )  # fmt: skip
    made.register_buffer("cos_sin_cache", angles(rotated).to(DTYPE))
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
    name: str, number: int = 0, *, rotated: int = HEAD, heads: int = HEADS,
    kv_heads: int = KV_HEADS, norm: Any = None, is_neox: bool = True, has_bias: bool = False,
    qkv: str = "qkv_proj", output: str = "o_proj", **parts: Any,
) -> Any:  # fmt: skip
    """An attention of a class of vLLM's.

    Args:
        name: of the class.
        number: of the layer.
        rotated: elements of a head that are rotated; 0 for an attention without a rotation.
        heads: of queries.
        kv_heads: of keys.
        norm: makes the norms of heads, if there are any.
        is_neox: whether halves of what is rotated turn together.
        has_bias: of the products.
        qkv: attribute of the product before.
        output: attribute of the product behind.
        parts: other attributes.

    """
    queries, keys = heads * HEAD, kv_heads * HEAD
    if norm is not None:
        parts |= {"q_norm": norm(HEAD), "k_norm": norm(HEAD)}
    if rotated:
        parts["rotary_emb"] = rotary(rotated, is_neox=is_neox)
    return bare(
        class_of(name), attn=attended(number, heads, kv_heads), q_size=queries, kv_size=keys,
        head_dim=HEAD, num_heads=heads, num_kv_heads=kv_heads, qk_norm=False,
        **{qkv: Product(queries + 2 * keys, HIDDEN, has_bias=has_bias),
           output: Product(HIDDEN, queries, has_bias=has_bias)},
        **parts,
    )  # fmt: skip


def mlp(name: str, activation: Any = None) -> Any:
    return bare(
        class_of(name), gate_up_proj=Product(2 * WIDE, HIDDEN),
        act_fn=activation or bare(SiluAndMul), down_proj=Product(HIDDEN, WIDE),
    )  # fmt: skip


def named_norms(norm: Any, *names: str) -> dict[str, Any]:
    return {name: norm(HIDDEN) for name in names}


def gelu_tanh() -> Any:
    return bare(GeluAndMul, approximate="tanh")


PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
GEMMA_NORMS = (*PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
GLM_NORMS = (*PRE_NORMS, "post_self_attn_layernorm", "post_mlp_layernorm")


def llama_layer(
    number: int, *, name: str = "Llama", layer: str = "", attends: str = "", mlp_of: str = "",
    norm: Any = rms_norm, activation: Any = None, names: tuple[str, ...] = PRE_NORMS,
    attention_parts: Any = None, **shape: Any,
) -> Any:  # fmt: skip
    """A layer whose parts have Llama's names, of vLLM's classes for a model."""
    attends = attends or f"{name}Attention"
    parts = {"norm": rms_norm} if attends == "Qwen3Attention" else {}
    return bare(
        class_of(layer or f"{name}DecoderLayer"),
        self_attn=attention(attends, number, **parts, **(attention_parts or {}), **shape),
        mlp=mlp(mlp_of or f"{name}MLP", activation and activation()),
        **named_norms(norm, *names),
    )  # fmt: skip


def mistral_layer(number: int, **shape: Any) -> Any:
    made = llama_layer(
        number, name="Mistral", attention_parts={"do_llama_4_scaling": False}, **shape
    )
    made.ada_rms_norm_t_cond = None
    return made


def granite_layer(number: int, **shape: Any) -> Any:
    made = llama_layer(number, name="Granite", attention_parts={"use_rope": True}, **shape)
    made.residual_multiplier = 0.22
    return made


def opt_layer(number: int, **shape: Any) -> Any:
    # All heads of queries have one of keys.
    shape |= {"rotated": 0, "kv_heads": shape.get("heads", HEADS)}
    return bare(
        class_of("OPTDecoderLayer"), do_layer_norm_before=True,
        self_attn=attention(
            "OPTAttention", number, output="out_proj", has_bias=True, **shape
        ),
        fc1=Product(WIDE, HIDDEN, has_bias=True), activation_fn=torch.nn.ReLU(),
        fc2=Product(HIDDEN, WIDE, has_bias=True),
        **named_norms(layer_norm, "self_attn_layer_norm", "final_layer_norm"),
    )  # fmt: skip


def falcon_layer(
    number: int, *, is_parallel: bool = True, is_new: bool = False, norms: int = 1, **shape: Any
) -> Any:
    names = ("ln_attn", "ln_mlp") if norms == 2 else PRE_NORMS
    config = SimpleNamespace(
        parallel_attn=is_parallel, new_decoder_architecture=is_new, num_ln_in_parallel_attn=norms
    )
    return bare(
        class_of("FalconDecoderLayer"), config=config,
        reduce_row_parallel_results=not (is_parallel or is_new),
        self_attention=attention(
            "FalconAttention", number, qkv="query_key_value", output="dense", use_rotary=True,
            **shape,
        ),
        mlp=bare(
            class_of("FalconMLP"), dense_h_to_4h=Product(WIDE, HIDDEN), act=bare(GELU, op=None),
            dense_4h_to_h=Product(HIDDEN, WIDE),
        ),
        **named_norms(layer_norm, *names),
    )  # fmt: skip


def experts_layer(number: int, name: str, *, mlp_at: str = "mlp", **shape: Any) -> Any:
    """A layer whose experts are an MLP, of which only vLLM's module knows."""
    parts = {"norm": rms_norm} if name == "Qwen3Moe" else {}
    return bare(
        class_of(f"{name}DecoderLayer"),
        self_attn=attention(f"{name}Attention", number, use_qk_norm=False, **parts, **shape),
        **{mlp_at: mlp("LlamaMLP")}, **named_norms(rms_norm, *PRE_NORMS),
    )  # fmt: skip


def gpt_oss_layer(number: int, **shape: Any) -> Any:
    return bare(
        class_of("TransformerBlock"),
        attn=attention("OAIAttention", number, has_bias=True, **shape),
        mlp=mlp("LlamaMLP"), **named_norms(rms_norm, *PRE_NORMS),
    )  # fmt: skip


FAMILIES: dict[str, tuple[str, Any]] = {
    "llama": ("LlamaModel", llama_layer),
    "qwen2": ("Qwen2Model", partial(llama_layer, name="Qwen2")),
    "qwen3": ("Qwen2Model", partial(llama_layer, name="Qwen3", mlp_of="Qwen2MLP")),
    "mistral": ("MistralModel", mistral_layer),
    "gemma": ("GemmaModel", partial(
        llama_layer, name="Gemma", norm=gemma_norm, activation=gelu_tanh
    )),
    "gemma2": ("Gemma2Model", partial(
        llama_layer, name="Gemma2", norm=gemma_norm, activation=gelu_tanh, names=GEMMA_NORMS
    )),
    "gemma3": ("Gemma3Model", partial(
        llama_layer, name="Gemma3", norm=gemma_norm, activation=gelu_tanh, names=GEMMA_NORMS,
        attention_parts={"norm": gemma_norm},
    )),
    "glm4": ("LlamaModel", partial(
        llama_layer, name="Glm4", mlp_of="LlamaMLP", names=GLM_NORMS,
        attention_parts={"is_neox": False},
    )),
    "granite": ("GraniteModel", granite_layer),
    "mixtral": ("MixtralModel", partial(
        experts_layer, name="Mixtral", mlp_at="block_sparse_moe"
    )),
    "qwen2_moe": ("Qwen2MoeModel", partial(experts_layer, name="Qwen2Moe")),
    "qwen3_moe": ("Qwen3MoeModel", partial(experts_layer, name="Qwen3Moe")),
    "glm4_moe": ("Glm4MoeModel", partial(experts_layer, name="Glm4Moe")),
    "gpt_oss": ("GptOssModel", gpt_oss_layer),
    "stablelm": ("StableLMEpochModel", partial(
        llama_layer, name="Stablelm", norm=torch_norm
    )),
    "opt": ("OPTDecoder", opt_layer),
    "falcon-7b": ("FalconModel", falcon_layer),
    "falcon-40b": ("FalconModel", partial(falcon_layer, is_new=True, norms=2)),
    "falcon-11b": ("FalconModel", partial(falcon_layer, is_new=True)),
    "falcon-rw": ("FalconModel", partial(falcon_layer, is_parallel=False)),
}  # fmt: skip
"""Classes of models, and what makes one of their layers."""


def model(
    layers: int, *, family: str = "llama", model: Any = None, layer: Any = None, **parts: Any
) -> Any:
    """A model whose first and last layers are on other stages.

    Args:
        layers: of this stage.
        family: one of `FAMILIES`.
        model: another class.
        layer: another class of the layers.
        parts: more arguments of what makes a layer.

    """
    cls, make = FAMILIES[family]
    missing = torch.nn.Identity()
    made = [make(number, **parts) for number in range(layers)]
    for one in made if layer is not None else ():
        one.__class__ = layer
    own = model or class_of(cls)
    attribute = "h" if family.startswith("falcon") else "layers"
    stages = torch.nn.ModuleList([missing, *made, missing])
    return bare(own, start_layer=1, end_layer=1 + layers, **{attribute: stages})


def layers_of(model: Any) -> list[Any]:
    """The layers of this stage, whatever has taken their places."""
    return list(getattr(model, "h" if hasattr(model, "h") else "layers"))[1:-1]


def attends(layer: Any) -> Any:
    """vLLM's attention of a layer."""
    names = ("self_attention", "self_attn", "attn")
    return next(getattr(layer, name) for name in names if hasattr(layer, name)).attn


def computed(
    layers: list[Any], calls: Calls, positions: Any, hidden: Any, residual: Any = None
) -> Any:
    """What layers give that a model calls one after the other: the sum, in float32."""
    for layer in layers:
        if calls is Calls.RESIDUAL:
            hidden, residual = layer(positions, hidden_states=hidden, residual=residual)
        elif calls is Calls.HIDDEN_FIRST:
            hidden, residual = layer(hidden, positions, residual)
        elif calls is Calls.SUM:
            hidden = layer(positions, hidden)
        elif calls is Calls.SUM_AND_MORE:
            hidden, _ = layer(positions, hidden)
        else:
            hidden = layer(hidden)
    return hidden.float() if residual is None else hidden.float() + residual.float()


def known_layers(model: Any, linears: dict[Any, Linear], kernel: StreamingLinear) -> list[Layer]:
    """The parts of a model's layers, all of which are known."""
    found = [fusible_layers.layer_of(model, layer, linears, kernel) for layer in layers_of(model)]
    assert not [why for why in found if isinstance(why, str)]
    return [layer for layer in found if isinstance(layer, Layer)]


def linears(model: Any) -> dict[Any, Linear]:
    def held(module: Product) -> Linear:
        is_compact = len(module.matrix) == HIDDEN and module.matrix.dtype == torch.bfloat16
        kind = CompactWeight if is_compact else PackedWeight
        weight = kind.made(pack(module.matrix), native)
        assert weight is not None
        return Linear(weight, module.added)

    return {module: held(module) for module in model.modules()
            if isinstance(module, Product)}  # fmt: skip


def fuse_model(model: Any, given: dict[Any, Linear], kernel: StreamingLinear) -> int:
    """Fuse what can be fused of a model; the number of fused layers.

    Args:
        model: of vLLM's classes.
        given: its linear layers that the kernel computes.
        kernel: computes them.

    """
    return layer_fusion.install(fusible_layers.find(model, given, kernel), kernel).layers

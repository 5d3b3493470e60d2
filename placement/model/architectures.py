"""Decoder layers of known architectures, as lists of linear layers and vectors.

Names and shapes are those of the checkpoints on the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from placement.model.config import Config, UnknownModelError
from placement.model.quantisation import FLOAT32, MXFP4_GROUP, Linear, Stored, method_of


@dataclass(frozen=True)
class Vector:
    """A norm, a bias or another tensor that no format quantises."""

    name: str
    elements: int
    dtype_bytes: int | None = None
    """Bytes of an element; None is the model's dtype."""


@dataclass(frozen=True)
class Matrix:
    """Weights of all experts in one tensor of the model's dtype."""

    name: str
    elements: int


@dataclass(frozen=True)
class Experts:
    """The same linear layers, once for each expert; names hold `*` for the expert's number."""

    count: int
    linears: tuple[Linear, ...]


Part = Linear | Vector | Matrix | Experts | Stored


@dataclass(frozen=True)
class Architecture:
    """How one family builds its layers."""

    layer: Callable[[Config, int], Iterator[Part]]
    classes: tuple[str, ...]
    """Entries of `architectures` that mean these layers; forks keep the type and change them."""
    tied: bool = False
    """Whether embeddings are tied where the config does not say."""
    prefix: str = "model.layers."
    vocabulary_everywhere: bool = False
    """vLLM 0.32 gives every pipeline stage of this family its embedding and output head."""
    window: Callable[[Config, int], bool] | None = None
    """Whether layer i slides its window; None where windows follow `layer_types` alone."""


def _attention(config: Config, *, qkv_bias: bool, out_bias: bool) -> Iterator[Part]:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield Linear("self_attn.q_proj", q, config.hidden, qkv_bias)
    yield Linear("self_attn.k_proj", kv, config.hidden, qkv_bias)
    yield Linear("self_attn.v_proj", kv, config.hidden, qkv_bias)
    yield Linear("self_attn.o_proj", config.hidden, q, out_bias)


def _head_norms(config: Config) -> Iterator[Part]:
    yield Vector("self_attn.q_norm.weight", config.head_dim)
    yield Vector("self_attn.k_norm.weight", config.head_dim)


def _gated_mlp(name: str, hidden: int, width: int, bias: bool = False) -> tuple[Linear, ...]:
    return (
        Linear(f"{name}.gate_proj", width, hidden, bias),
        Linear(f"{name}.up_proj", width, hidden, bias),
        Linear(f"{name}.down_proj", hidden, width, bias),
    )


def _norms(config: Config, *more: str) -> Iterator[Part]:
    for name in ("input_layernorm", "post_attention_layernorm", *more):
        yield Vector(f"{name}.weight", config.hidden)


def _llama(config: Config, index: int) -> Iterator[Part]:
    bias = config.flag("attention_bias")
    yield from _attention(config, qkv_bias=bias, out_bias=bias)
    width = config.number("intermediate_size")
    yield from _gated_mlp("mlp", config.hidden, width, config.flag("mlp_bias"))
    yield from _norms(config)


def _mistral(config: Config, index: int) -> Iterator[Part]:
    yield from _attention(config, qkv_bias=False, out_bias=False)
    yield from _gated_mlp("mlp", config.hidden, config.number("intermediate_size"))
    yield from _norms(config)


def _qwen2(config: Config, index: int) -> Iterator[Part]:
    yield from _attention(config, qkv_bias=True, out_bias=False)
    yield from _gated_mlp("mlp", config.hidden, config.number("intermediate_size"))
    yield from _norms(config)


def _qwen3(config: Config, index: int) -> Iterator[Part]:
    yield from _llama(config, index)
    yield from _head_norms(config)


def _gemma2(config: Config, index: int) -> Iterator[Part]:
    yield from _llama(config, index)
    for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
        yield Vector(f"{name}.weight", config.hidden)


def _gemma3(config: Config, index: int) -> Iterator[Part]:
    yield from _gemma2(config, index)
    yield from _head_norms(config)


def _opt(config: Config, index: int) -> Iterator[Part]:
    bias, hidden = config.flag("enable_bias", True), config.hidden
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        yield Linear(f"self_attn.{name}", hidden, hidden, bias)
    yield Linear("fc1", config.number("ffn_dim"), hidden, bias)
    yield Linear("fc2", hidden, config.number("ffn_dim"), bias)
    if config.flag("layer_norm_elementwise_affine", True):
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            yield Vector(f"{name}.weight", hidden)
            yield Vector(f"{name}.bias", hidden)


def _mixtral(config: Config, index: int) -> Iterator[Part]:
    hidden, width = config.hidden, config.number("intermediate_size")
    yield from _attention(config, qkv_bias=False, out_bias=False)
    yield Linear("block_sparse_moe.gate", config.experts, hidden, quantised=False)
    expert = "block_sparse_moe.experts.*."
    yield Experts(
        config.experts,
        (
            Linear(f"{expert}w1", width, hidden),
            Linear(f"{expert}w2", hidden, width),
            Linear(f"{expert}w3", width, hidden),
        ),
    )
    yield from _norms(config)


def _qwen3_moe(config: Config, index: int) -> Iterator[Part]:
    bias = config.flag("attention_bias")
    yield from _attention(config, qkv_bias=bias, out_bias=bias)
    yield from _head_norms(config)
    sparse_step = config.number_or(1, "decoder_sparse_step")
    dense = config.has("mlp_only_layers") and index in config.numbers("mlp_only_layers")
    if dense or not config.experts or (index + 1) % sparse_step:
        yield from _gated_mlp("mlp", config.hidden, config.number("intermediate_size"))
    else:
        yield Linear("mlp.gate", config.experts, config.hidden, quantised=False)
        width = config.number("moe_intermediate_size")
        yield Experts(config.experts, _gated_mlp("mlp.experts.*", config.hidden, width))
    yield from _norms(config)


def _qwen2_moe(config: Config, index: int) -> Iterator[Part]:
    yield from _attention(config, qkv_bias=config.flag("qkv_bias", True), out_bias=False)
    sparse_step = config.number_or(1, "decoder_sparse_step")
    dense = config.has("mlp_only_layers") and index in config.numbers("mlp_only_layers")
    hidden = config.hidden
    if dense or not config.experts or (index + 1) % sparse_step:
        yield from _gated_mlp("mlp", hidden, config.number("intermediate_size"))
    else:
        yield Linear("mlp.gate", config.experts, hidden, quantised=False)
        width = config.number("moe_intermediate_size")
        yield Experts(config.experts, _gated_mlp("mlp.experts.*", hidden, width))
        shared = config.number("shared_expert_intermediate_size")
        yield from _gated_mlp("mlp.shared_expert", hidden, shared)
        yield Linear("mlp.shared_expert_gate", 1, hidden, quantised=False)
    yield from _norms(config)


def _glm4_moe(config: Config, index: int) -> Iterator[Part]:
    yield from _attention(config, qkv_bias=config.flag("attention_bias"), out_bias=False)
    if config.flag("use_qk_norm"):
        yield from _head_norms(config)
    yield from _norms(config)
    hidden = config.hidden
    if index < config.number("first_k_dense_replace", least=0):
        yield from _gated_mlp("mlp", hidden, config.number("intermediate_size"))
        return
    width = config.number("moe_intermediate_size")
    yield Linear("mlp.gate", config.experts, hidden, quantised=False)
    yield Vector("mlp.gate.e_score_correction_bias", config.experts, FLOAT32)
    yield Experts(config.experts, _gated_mlp("mlp.experts.*", hidden, width))
    if shared := config.number_or(0, "n_shared_experts", least=0):
        yield from _gated_mlp("mlp.shared_experts", hidden, width * shared)


def _gpt_oss(config: Config, index: int) -> Iterator[Part]:
    bias, hidden = config.flag("attention_bias", True), config.hidden
    yield from _attention(config, qkv_bias=bias, out_bias=bias)
    yield Vector("self_attn.sinks", config.heads)
    yield Linear("mlp.router", config.experts, hidden, bias=True, quantised=False)
    width = config.number("intermediate_size")
    settings = config.section("quantization_config")
    method = None if settings is None else method_of(settings)
    for name, out, in_ in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
        yield from _fused_experts(f"mlp.experts.{name}", config.experts, out, in_, method)
        yield Vector(f"mlp.experts.{name}_bias", config.experts * out)
    yield from _norms(config)


def _fused_experts(name: str, experts: int, out: int, in_: int, method: object) -> Iterator[Part]:
    """One tensor of all experts; in MXFP4 groups of values, two a byte, with a scale each."""
    weights = experts * out * in_
    if method == "mxfp4":
        yield Stored(f"{name}_blocks", weights // 2, 1, values=2)
        yield Stored(f"{name}_scales", weights // MXFP4_GROUP, 1, values=0)
    else:
        yield Matrix(name, weights)


def _deepseek(config: Config, index: int) -> Iterator[Part]:
    yield from _latent_attention(config)
    yield from _norms(config)
    hidden = config.hidden
    frequency = config.number_or(1, "moe_layer_freq")
    if index < config.number("first_k_dense_replace", least=0) or index % frequency:
        yield from _gated_mlp("mlp", hidden, config.number("intermediate_size"))
        return
    width = config.number("moe_intermediate_size")
    yield Linear("mlp.gate", config.experts, hidden, quantised=False)
    if config.values.get("topk_method", _V3_TOPK[config.model_type]) == "noaux_tc":
        yield Vector("mlp.gate.e_score_correction_bias", config.experts, FLOAT32)
    yield Experts(config.experts, _gated_mlp("mlp.experts.*", hidden, width))
    if config.has("n_shared_experts"):
        shared = width * config.number("n_shared_experts", least=0)
        yield from _gated_mlp("mlp.shared_experts", hidden, shared)


_V3_TOPK = {"deepseek_v2": "greedy", "deepseek_v3": "noaux_tc", "kimi_k2": "noaux_tc"}


def _latent_attention(config: Config) -> Iterator[Part]:
    hidden, heads, bias = config.hidden, config.heads, config.flag("attention_bias")
    rope = config.number("qk_rope_head_dim")
    nope, value = config.number("qk_nope_head_dim"), config.number("v_head_dim")
    latent = config.number("kv_lora_rank")
    if config.has("q_lora_rank"):
        rank = config.number("q_lora_rank")
        yield Linear("self_attn.q_a_proj", rank, hidden, bias)
        yield Vector("self_attn.q_a_layernorm.weight", rank)
        yield Linear("self_attn.q_b_proj", heads * (nope + rope), rank)
    else:
        yield Linear("self_attn.q_proj", heads * (nope + rope), hidden)
    yield Linear("self_attn.kv_a_proj_with_mqa", latent + rope, hidden, bias)
    yield Vector("self_attn.kv_a_layernorm.weight", latent)
    yield Linear("self_attn.kv_b_proj", heads * (nope + value), latent)
    yield Linear("self_attn.o_proj", hidden, heads * value, bias)


def _qwen_window(config: Config, index: int) -> bool:
    used = config.flag("use_sliding_window")
    return used and index >= config.number_or(0, "max_window_layers", least=0)


def _gemma3_window(config: Config, index: int) -> bool:
    pattern = config.number_or(6, "sliding_window_pattern", "_sliding_window_pattern")
    return bool((index + 1) % pattern)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_llama, ("LlamaForCausalLM", "LLaMAForCausalLM")),
    "mistral": Architecture(
        _mistral, ("MistralForCausalLM",), window=lambda config, index: True
    ),
    "qwen2": Architecture(_qwen2, ("Qwen2ForCausalLM",), window=_qwen_window),
    "qwen3": Architecture(_qwen3, ("Qwen3ForCausalLM",), window=_qwen_window),
    "gemma": Architecture(
        _llama, ("GemmaForCausalLM",), tied=True, vocabulary_everywhere=True
    ),
    "gemma2": Architecture(
        _gemma2, ("Gemma2ForCausalLM",), tied=True, vocabulary_everywhere=True,
        window=lambda config, index: index % 2 == 0,
    ),
    "gemma3_text": Architecture(
        _gemma3, ("Gemma3ForCausalLM",), tied=True, vocabulary_everywhere=True,
        window=_gemma3_window,
    ),
    "opt": Architecture(
        _opt, ("OPTForCausalLM",), tied=True, prefix="model.decoder.layers.",
        vocabulary_everywhere=True,
    ),
    "mixtral": Architecture(
        _mixtral, ("MixtralForCausalLM",), vocabulary_everywhere=True,
        window=lambda config, index: True,
    ),
    "qwen3_moe": Architecture(
        _qwen3_moe, ("Qwen3MoeForCausalLM",), vocabulary_everywhere=True, window=_qwen_window
    ),
    "qwen2_moe": Architecture(
        _qwen2_moe, ("Qwen2MoeForCausalLM",), vocabulary_everywhere=True, window=_qwen_window
    ),
    "glm4_moe": Architecture(_glm4_moe, ("Glm4MoeForCausalLM",)),
    "gpt_oss": Architecture(_gpt_oss, ("GptOssForCausalLM",), vocabulary_everywhere=True),
    "deepseek_v2": Architecture(_deepseek, ("DeepseekV2ForCausalLM",)),
    "deepseek_v3": Architecture(_deepseek, ("DeepseekV3ForCausalLM",)),
    "kimi_k2": Architecture(_deepseek, ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM")),
}  # fmt: skip


def architecture_of(config: Config) -> Architecture | None:
    """How the layers of a decoder are built; None where its config alone does not tell."""
    known = ARCHITECTURES.get(config.model_type)
    names = config.values.get("architectures")
    if known is None or not isinstance(names, list) or not names:
        return known
    return known if names[0] in known.classes else None


def window_of(config: Config, index: int) -> int | None:
    """Sliding window of a layer in tokens; None where it sees the whole context."""
    if not config.has("sliding_window"):
        return None
    types = config.texts("layer_types")
    if types:
        if len(types) != config.layers:
            raise UnknownModelError(
                f"layer_types has {len(types)} entries, num_hidden_layers is {config.layers}"
            )
        slides = types[index] == "sliding_attention"
    else:
        known = ARCHITECTURES.get(config.model_type)
        rule = None if known is None else known.window
        slides = rule is not None and rule(config, index)
    return config.number("sliding_window") if slides else None

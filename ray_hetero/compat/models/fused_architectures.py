"""Architectures whose decoder layers a CPU rank computes as one operator, and why others' are not.

docs/compatibility.md has this as a table, and planning prices layers by it; neither needs vLLM.
tests/unit/compat/test_fused_architectures.py holds it against vLLM and `decoder_classes.CLASSES`.
"""

from __future__ import annotations

from dataclasses import dataclass

IN_TRANSFORMERS = "vLLM runs it with Transformers' modelling code, whose layers are not recognised"
EXPERTS = "experts in a separate call"
OTHER_EXPERTS = "layers not recognised; experts and linear layers stream one by one"
LATENT = "multi-head latent attention"
LINEAR_STATES = "layers with a linear state, those with attention operator by operator"


@dataclass(frozen=True)
class Architecture:
    """Some architectures of checkpoints that vLLM runs with the same layers."""

    models: str
    """Names of the models for people."""
    names: tuple[str, ...]
    """Values in `architectures` of a checkpoint's config.json."""
    model_types: tuple[str, ...] = ()
    """Values of `model_type` in a config.json whose layers are computed as one operator."""
    in_engines: tuple[str, ...] = ()
    """Values of `model_type` for which whole engines are compared with stock vLLM by the tests."""
    parts: str = ""
    """Parts that these layers have beside those of Llama's."""
    is_in_parts: bool = False
    """Whether the attention of a layer is one operator, and what comes behind is another."""
    why_not: str = ""
    """Why they are computed operator by operator; empty if they are not."""


ARCHITECTURES = (
    Architecture(
        "Llama, InternLM 3, TeleChat 3",
        ("LlamaForCausalLM", "InternLM3ForCausalLM", "TeleChat3ForCausalLM"),
        ("llama", "internlm3", "telechat3"),
        ("llama",),
    ),
    Architecture(
        "Mistral, Ministral 3",
        ("MistralForCausalLM", "Ministral3ForCausalLM"),
        ("mistral", "ministral3"),
        ("mistral",),
        "sliding window",
    ),
    Architecture(
        "Phi 3, Phi 4", ("Phi3ForCausalLM",), ("phi3",), ("phi3",), "two position tables"
    ),
    Architecture("Qwen 2, Qwen 2.5", ("Qwen2ForCausalLM",), ("qwen2",), parts="biases"),
    Architecture("Qwen 3", ("Qwen3ForCausalLM",), ("qwen3",), ("qwen3",), "per-head norms"),
    Architecture(
        "Gemma", ("GemmaForCausalLM",), ("gemma",), parts="norms weighted by 1 + w, GELU"
    ),
    Architecture(
        "Gemma 2, Gemma 3",
        ("Gemma2ForCausalLM", "Gemma3ForCausalLM"),
        ("gemma2", "gemma3", "gemma3_text"),
        ("gemma2", "gemma3_text"),
        "norms after attention and MLP, sliding window, soft cap",
    ),
    Architecture(
        "GLM-4 (0414)",
        ("Glm4ForCausalLM",),
        ("glm4",),
        ("glm4",),
        "norms after attention and MLP, interleaved rotation of half of each head",
    ),
    Architecture(
        "Granite",
        ("GraniteForCausalLM", "GraniteSWAForCausalLM"),
        ("granite", "granite_swa"),
        ("granite",),
        "multipliers, sinks",
    ),
    Architecture(
        "StableLM", ("StableLmForCausalLM",), ("stablelm",), ("stablelm",),
        "layer norms, partial rotation",
    ),
    Architecture(
        "OPT", ("OPTForCausalLM",), ("opt",), ("opt",), "layer norms, no gate, no rotation"
    ),
    Architecture(
        "Falcon",
        ("FalconForCausalLM",),
        ("falcon",),
        parts="layer norms, no gate, MLP beside the attention; decode steps not with ALiBi",
    ),
    Architecture(
        "GPT-NeoX, OLMo to OLMo 3, Phi 1 and 2, GLM-4 (9B), StarCoder 2, SmolLM 3, Seed-OSS",
        (
            "GPTNeoXForCausalLM", "OlmoForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM",
            "PhiForCausalLM", "GlmForCausalLM", "Starcoder2ForCausalLM", "SmolLM3ForCausalLM",
            "SeedOssForCausalLM",
        ),
        why_not=IN_TRANSFORMERS,
    ),
    Architecture(
        "Mixtral", ("MixtralForCausalLM",), ("mixtral",), ("mixtral",), EXPERTS,
        is_in_parts=True,
    ),
    Architecture(
        "Qwen 2 MoE, Qwen 3 MoE",
        ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
        ("qwen2_moe", "qwen3_moe"),
        ("qwen2_moe", "qwen3_moe"),
        f"{EXPERTS}, per-head norms",
        is_in_parts=True,
    ),
    Architecture(
        "GLM-4.5", ("Glm4MoeForCausalLM",), ("glm4_moe",), ("glm4_moe",),
        f"{EXPERTS}, partial rotation", is_in_parts=True,
    ),
    Architecture(
        "gpt-oss", ("GptOssForCausalLM",), ("gpt_oss",), ("gpt_oss",),
        f"{EXPERTS}, sliding window, sinks", is_in_parts=True,
    ),
    Architecture("OLMoE, Granite MoE, Phi MoE",
        ("OlmoeForCausalLM", "GraniteMoeForCausalLM", "PhiMoEForCausalLM"),
        why_not=OTHER_EXPERTS,
    ),
    Architecture(
        "DeepSeek V2 and V3, Kimi K2",
        ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
        ("deepseek_v2", "deepseek_v3", "kimi_k2"),
        ("deepseek_v2", "deepseek_v3"),
        f"{EXPERTS}, {LATENT}",
        is_in_parts=True,
    ),
    Architecture(
        "Qwen3-Next, Qwen3.5",
        ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        ("qwen3_next",),
        f"{EXPERTS}, {LINEAR_STATES}",
        is_in_parts=True,
    ),
    Architecture(
        "MiniCPM 3",
        ("MiniCPM3ForCausalLM",),
        why_not="keys and values of all heads are made of a latent before vLLM's attention",
    ),
    Architecture(
        "Cohere, GPT-2, GPT-J, BLOOM, InternLM 2, Nemotron, EXAONE",
        (
            "CohereForCausalLM", "GPT2LMHeadModel", "GPTJForCausalLM", "BloomForCausalLM",
            "InternLM2ForCausalLM", "NemotronForCausalLM", "ExaoneForCausalLM",
        ),
        why_not="their layers have not been described yet",
    ),
)  # fmt: skip

FUSED_MODEL_TYPES = frozenset(
    model_type
    for one in ARCHITECTURES
    if not one.why_not and not one.is_in_parts
    for model_type in one.model_types
)
"""Models whose layers are priced as one operator."""


def family_of(model_type: str) -> str:
    """Comparison with stock vLLM in the tests: this family, one of the same layers, or neither.

    Args:
        model_type: of the model's config.json.

    """
    for one in ARCHITECTURES:
        if model_type in one.in_engines:
            return f"yes: tokens of engines of {model_type} models are compared with stock vLLM"
        if model_type in one.model_types:
            others = f" ({', '.join(one.in_engines)})" if one.in_engines else ""
            return (
                f"in parts: {model_type} models compute the layers of families that are tested"
                f"{others}"
            )
    return f"no: neither {model_type} models nor others with the same layers are tested"

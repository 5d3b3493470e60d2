"""Demo checkpoints of architectures that `ray-hetero demo-model` does not write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray_hetero.cli.demo.model import SLIDING_WINDOW, DemoShape

Common = dict[str, Any]


def _gated(shape: DemoShape) -> Common:
    return {
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "tie_word_embeddings": False,
    }


def _mistral(shape: DemoShape, common: Common) -> Any:
    from transformers import MistralConfig

    return MistralConfig(**common, **_gated(shape), sliding_window=SLIDING_WINDOW)


def _phi3(shape: DemoShape, common: Common) -> Any:
    from transformers import Phi3Config

    return Phi3Config(**common, **_gated(shape), sliding_window=None)


def _gemma2(shape: DemoShape, common: Common) -> Any:
    from transformers import Gemma2Config

    given = _gated(shape) | {"tie_word_embeddings": True}
    return Gemma2Config(
        **common,
        **given,
        head_dim=shape.head_size,
        query_pre_attn_scalar=shape.head_size,
        sliding_window=SLIDING_WINDOW,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0,
    )


def _granite(shape: DemoShape, common: Common) -> Any:
    from transformers import GraniteConfig

    return GraniteConfig(
        **common,
        **_gated(shape),
        embedding_multiplier=2.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    )


def _glm4(shape: DemoShape, common: Common) -> Any:
    from transformers import Glm4Config

    return Glm4Config(**common, **_gated(shape), head_dim=shape.head_size, attention_bias=True)


def _stablelm(shape: DemoShape, common: Common) -> Any:
    from transformers import StableLmConfig

    return StableLmConfig(**common, **_gated(shape), use_qkv_bias=True)


def _routed(shape: DemoShape) -> Common:
    return _gated(shape) | {
        "num_experts_per_tok": 4,
        "moe_intermediate_size": shape.intermediate // 4,
        "norm_topk_prob": True,
    }


def _qwen2_moe(shape: DemoShape, common: Common) -> Any:
    from transformers import Qwen2MoeConfig

    return Qwen2MoeConfig(
        **common, **_routed(shape), num_experts=8, shared_expert_intermediate_size=64
    )


def _latent(shape: DemoShape) -> Common:
    """Multi-head latent attention, and experts in groups, beside shared ones."""
    return _routed(shape) | {
        "num_experts_per_tok": 3,
        "num_key_value_heads": shape.heads,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        # One of the few sizes that vLLM's attention of prompts takes on a GPU.
        "qk_nope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
        # Rounding to bf16 may turn the choice of a group, that is of all experts of a token.  With
        # 1.5 that alone moves a token's logprob by up to 7.9 in V3, with 0.5 by up to 0.8.
        "routed_scaling_factor": 0.5,
        "first_k_dense_replace": 1,
    }


def _deepseek_v2(shape: DemoShape, common: Common) -> Any:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        **common, **_latent(shape), q_lora_rank=None, topk_method="group_limited_greedy"
    )


def _deepseek_v3(shape: DemoShape, common: Common) -> Any:
    from transformers import DeepseekV3Config

    # Queries have a latent too, and the router a bias for each expert.
    return DeepseekV3Config(**common, **_latent(shape), q_lora_rank=128, topk_method="noaux_tc")


def _glm4_moe(shape: DemoShape, common: Common) -> Any:
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(
        **common,
        **_routed(shape),
        head_dim=shape.head_size,
        n_routed_experts=8,
        n_shared_experts=1,
        first_k_dense_replace=1,
    )


def _qwen3_next(shape: DemoShape, common: Common) -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **common,
        **_routed(shape),
        head_dim=shape.head_size,
        num_experts=8,
        shared_expert_intermediate_size=64,
        # A layer with an MLP, others with experts.
        mlp_only_layers=[0],
        layer_types=["linear_attention", "full_attention"] * (shape.layers // 2),
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )


def _gpt_oss(shape: DemoShape, common: Common) -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(
        **common,
        **_gated(shape),
        head_dim=shape.head_size,
        num_local_experts=8,
        num_experts_per_tok=4,
        sliding_window=SLIDING_WINDOW,
    )


MAKERS: dict[str, Callable[[DemoShape, Common], Any]] = {
    "mistral": _mistral,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "granite": _granite,
    "glm4": _glm4,
    "stablelm": _stablelm,
    "qwen2_moe": _qwen2_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "qwen3_next": _qwen3_next,
}
"""Name → maker of its transformers config."""

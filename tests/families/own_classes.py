"""Architectures whose configuration classes come with their checkpoints, as code.

Each takes a class of the same kind from Transformers or vLLM, with the keys that vLLM's model reads
beyond it.
"""

from __future__ import annotations

from typing import Any

from families.small_sizes import (
    ALTERNATING,
    EXPERTS,
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    MOE_INNER,
    POSITIONS,
    TOP_K,
    VOCABULARY,
    WINDOW,
)

ROUTED: dict[str, Any] = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_shared_experts": 1,
    "moe_intermediate_size": MOE_INNER,
    "moe_shared_expert_intermediate_size": MOE_INNER,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 0.5,
}
BAILING: dict[str, Any] = ROUTED | {
    "use_bias": False,
    "use_qkv_bias": False,
    "embedding_dropout": 0.0,
    "head_dim": HEAD_SIZE,
    "rope_theta": 10000.0,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": HIDDEN,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
SIGMOID: dict[str, Any] = {"score_function": "sigmoid", "moe_router_enable_expert_bias": True}
CHATGLM: tuple[str, dict[str, Any]] = (
    "chatglm",
    {
        "num_layers": LAYERS,
        "padded_vocab_size": VOCABULARY,
        "vocab_size": VOCABULARY,
        "ffn_hidden_size": INNER,
        "kv_channels": HEAD_SIZE,
        "seq_length": POSITIONS,
        "multi_query_attention": True,
        "multi_query_group_num": KV_HEADS,
        "add_qkv_bias": True,
        "original_rope": True,
        "tie_word_embeddings": False,
        "rmsnorm": True,
        "num_hidden_layers": None,
    },
)
PANGU: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "moe_intermediate_size": MOE_INNER,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
    "routed_scaling_factor": 0.5,
    "router_enable_expert_bias": True,
    "rope_theta": 10000.0,
}
STEP_ROUTED: dict[str, Any] = {
    "num_attention_groups": 1,
    "moe_num_experts": EXPERTS,
    "moe_top_k": TOP_K,
    "share_expert_dim": MOE_INNER,
}
MIMO_V2: tuple[str, dict[str, Any]] = (
    "mimo_v2_flash",
    {
        "hybrid_layer_pattern": [1, 0] * (LAYERS // 2),
        "moe_layer_freq": [0] + [1] * (LAYERS - 1),
        "layernorm_epsilon": 1e-5,
        "sliding_window_size": WINDOW,
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": KV_HEADS,
        "swa_head_dim": HEAD_SIZE,
        "swa_v_head_dim": HEAD_SIZE,
        "v_head_dim": HEAD_SIZE,
        "swa_rope_theta": 10000.0,
        "add_swa_attention_sink_bias": False,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
    },
)

OWN_CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "BailingMoeForCausalLM": ("llama", BAILING),
    "BailingMoeV2ForCausalLM": ("llama", BAILING | SIGMOID | {"use_qk_norm": True}),
    "BailingMoeV2_5ForCausalLM": (
        "deepseek_v3",
        BAILING | LATENT | SIGMOID | {"layer_group_size": 2},
    ),
    "BailingMoeV3ForCausalLM": (
        "deepseek_v3",
        BAILING
        | LATENT
        | {"layer_group_size": 2, "no_kda_lora": True, "short_conv_kernel_size": 4},
    ),
    "ChatGLMForConditionalGeneration": CHATGLM,
    "ChatGLMModel": CHATGLM,
    "DeepseekForCausalLM": (
        "llama",
        {
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 1,
            "num_experts_per_tok": TOP_K,
            "moe_intermediate_size": MOE_INNER,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "norm_topk_prob": True,
        },
    ),
    "ExaoneForCausalLM": ("llama", {"activation_function": "silu", "layer_norm_epsilon": 1e-5}),
    "ExaoneMoEForCausalLM": ("exaone_moe", {}),
    "IQuestCoderForCausalLM": ("llama", {}),
    "IQuestLoopCoderForCausalLM": (
        "qwen2",
        {"loop_num": 2, "loop_window_size": 64, "max_window_layers": LAYERS},
    ),
    "InternLM2ForCausalLM": ("llama", {}),
    "InternLM3ForCausalLM": ("llama", {}),
    "K2HorizonForCausalLM": (
        "qwen3_moe",
        {
            "attention_gate_func": "sigmoid",
            "head_dim": HEAD_SIZE,
            "layernorm_num_groups": 4,
            "mlp_only_layers": [0],
            "moe_gate_bias": True,
            "mova_num_experts": 0,
            "mova_num_experts_per_tok": 0,
            "num_experts": EXPERTS,
            "num_shared_experts": 1,
            "query_key_norm": True,
            "rope_head_dim": HEAD_SIZE,
            "router_scaling_factor": 1.0,
            "router_score_func": "sigmoid",
        },
    ),
    "LLaMAForCausalLM": ("llama", {}),
    "LongcatFlashNgramForCausalLM": (
        "longcat_flash",
        {"ngram_vocab_size_ratio": 2, "emb_split_num": 2, "emb_neighbor_num": 2},
    ),
    "MiMoForCausalLM": ("qwen2", {"num_nextn_predict_layers": 0}),
    "MiMoV2FlashForCausalLM": MIMO_V2,
    "MiMoV2ForCausalLM": MIMO_V2,
    "MiniCPMForCausalLM": ("llama", {"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 12}),
    "MistralLarge3ForCausalLM": (
        "deepseek_v3",
        LATENT | {"num_key_value_heads": HEADS, "topk_method": "noaux_tc"},
    ),
    "MuseGlimmerForCausalLM": ("muse_glimmer_text", {}),
    "OrionForCausalLM": ("llama", {}),
    "PanguEmbeddedForCausalLM": ("llama", {}),
    "PanguProMoEV2ForCausalLM": ("llama", PANGU),
    "PanguUltraMoEForCausalLM": ("deepseek_v3", PANGU | LATENT | {"sandwich_norm": True}),
    "Param2MoEForCausalLM": (
        # A class that leaves rope_theta where the model reads it.
        "gpt_neox",
        ROUTED
        | SIGMOID
        | {
            "head_dim": HEAD_SIZE,
            "hidden_act": "silu",
            "num_key_value_heads": KV_HEADS,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "use_qk_norm": True,
        },
    ),
    "PhiMoEForCausalLM": ("phimoe", {"attention_bias": True, "lm_head_bias": True}),
    "Plamo3ForCausalLM": (
        "llama",
        {
            "interleaved_sliding_window": [WINDOW, None] * (LAYERS // 2),
            "layer_types": ALTERNATING,
            "rope_local_theta": 10000.0,
        },
    ),
    "Rnj1ForCausalLM": ("gemma3_text", {"attention_bias": False}),
    "SarvamMLAForCausalLM": (
        "deepseek_v3",
        ROUTED | LATENT | SIGMOID | {"q_lora_rank": None, "num_key_value_heads": HEADS},
    ),
    "SarvamMoEForCausalLM": ("llama", BAILING | SIGMOID | {"use_qk_norm": True}),
    "SolarForCausalLM": (
        "llama",
        {"bskcn_1": [1], "bskcn_2": [2], "bskcn_3": [2], "bskcn_4": [3], "bskcn_tv": [0.9, 0.8]},
    ),
    "Step1ForCausalLM": ("llama", {"num_attention_groups": KV_HEADS}),
    "Step3TextForCausalLM": (
        "step3_text",
        STEP_ROUTED | {"share_q_dim": HIDDEN, "moe_layers_enum": "1,2,3"},
    ),
    "Step3p5ForCausalLM": (
        "step3p5",
        STEP_ROUTED
        | {
            "num_attention_groups": KV_HEADS,
            "head_dim": HEAD_SIZE,
            "layer_types": ["full_attention", "sliding_attention"] * (LAYERS // 2),
            "sliding_window": WINDOW,
            "moe_layers_enum": "1,2,3",
            "max_position_embeddings": POSITIONS,
            "use_rope_layers": [],
            "partial_rotary_factors": [0.5, 1.0] * (LAYERS // 2),
            "attention_other_setting": {
                "attention_type": "sliding_attention",
                "num_attention_heads": HEADS,
                "num_attention_groups": KV_HEADS,
                "head_dim": HEAD_SIZE,
            },
            "moe_router_activation": "sigmoid",
            "use_head_wise_attn_gate": True,
        },
    ),
    "TeleChat2ForCausalLM": (
        "llama",
        {
            "n_layer": LAYERS,
            "n_head": HEADS,
            "ffn_hidden_size": INNER,
            "layer_norm_epsilon": 1e-5,
            "num_key_value_heads": HEADS,
        },
    ),
    "TeleChat3ForCausalLM": ("llama", {}),
    "TeleFLMForCausalLM": (
        "llama",
        {"mup_scale_factor": 1.0, "output_mult": 1.0, "input_mult": 1.0, "use_mup": True},
    ),
}
"""Architecture → (model type of a configuration class, keys)."""

"""Shapes of known models, written as a config.json, and their weight bytes; no weights, which are
in heavy_tailed.py."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "none": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 512},
    "tiny": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
             "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512},
    "tiny-moe": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
                 "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
                 "vocab_size": 512, "num_experts": 16, "num_experts_per_tok": 4,
                 "moe_intermediate_size": 128},
    # Layers whose experts are next to nothing beside handing tokens to them.
    "handover": {"hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 48,
                 "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128,
                 "vocab_size": 512, "num_experts": 1, "num_experts_per_tok": 1,
                 "moe_intermediate_size": 64},
    # SmolLM2-135M.
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
             "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152},
    # The shapes of TinyLlama 1.1B, Llama 3.2 1B and Llama 3 8B.
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
           "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000},
    "1b-16": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
              "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    # Four layers of TinyLlama.
    "1b-4": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4,
             "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000},
    # The same linear layers in models of other families.
    "1b-4-mistral": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4,
                     "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000},
    "1b-4-gemma2": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4,
                    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64,
                    "vocab_size": 32000},
    "1b-4-gemma3": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4,
                    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64,
                    "vocab_size": 32000},
    # 40.6 GB in bf16.
    "20b": {"hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 48,
            "num_attention_heads": 48, "num_key_value_heads": 8, "vocab_size": 128256},
    # Sixteen of the 48 layers of Qwen3 30B-A3B.
    "30b-a3b-16": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16,
                   "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
                   "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
                   "moe_intermediate_size": 768},
    # And 34 of them, 43.6 GB in bf16.
    "30b-a3b-34": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 34,
                   "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
                   "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
                   "moe_intermediate_size": 768},
}  # fmt: skip
"""Shapes by name: dense ones of Llama unless they are in `FAMILIES`, and Qwen3's with experts."""

_GEMMA: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True, "query_pre_attn_scalar": 64, "rope_theta": 10000.0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "1b-4-mistral": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096,
    },
    "1b-4-gemma2": _GEMMA | {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 4096,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "1b-4-gemma3": _GEMMA | {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "sliding_window": 512, "rope_local_base_freq": 10000.0,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
}  # fmt: skip
"""Keys that the config.json of other families than Llama has in addition, by name of the shape."""

DTYPE_BYTES = 2


QUANTISED: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "w4a16": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": {
            "targets": ["Linear"], "input_activations": None, "output_activations": None,
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                        "group_size": 128, "dynamic": False},
        }},
    },
}  # fmt: skip
"""Ways of storing linear layers, as the configuration of a checkpoint has them."""


def write_shape(name: str, *, layers: int | None = None, stored: str | None = None) -> Path:
    """Write a config.json of a known shape into a folder for temporary files; answers the folder.

    Args:
        name: a key of `SHAPES`.
        layers: another number of layers than the shape has.
        stored: a key of `QUANTISED`; None is bf16.

    """
    kind = f"{name}-{layers or 'all'}" + (f"-{stored}" if stored else "")
    directory = Path(tempfile.gettempdir()) / "ray_hetero_shapes" / kind
    directory.mkdir(parents=True, exist_ok=True)
    config = config_of(name) | ({} if layers is None else {"num_hidden_layers": layers})
    config |= {"quantization_config": QUANTISED[stored]} if stored else {}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def config_of(name: str) -> dict[str, Any]:
    """Contents of the config.json of a known shape, in bf16."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if "num_experts" in SHAPES[name]:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    return config | FAMILIES.get(name, {}) | SHAPES[name]


def layer_bytes(shape: dict[str, int]) -> int:
    """Bytes of one decoder layer in bf16: attention, MLP or all experts, and the norms of Llama."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    others = 2 * hidden
    if experts := shape.get("num_experts"):
        inner = experts * shape["moe_intermediate_size"]
        # The router, and norms of queries and keys.
        others += hidden * experts + 2 * head_size(shape)
    queries = shape["num_attention_heads"] * head_size(shape)
    kv = shape["num_key_value_heads"] * head_size(shape)
    return DTYPE_BYTES * (2 * hidden * queries + 2 * hidden * kv + 3 * hidden * inner + others)


def more_norm_bytes(name: str) -> int:
    """Bytes of the norms that a layer of a known shape has beside those of Llama."""
    family, shape = FAMILIES.get(name, {}).get("model_type", ""), SHAPES[name]
    behind = 2 * shape["hidden_size"] if family.startswith("gemma") else 0
    of_heads = 2 * head_size(shape) if family == "gemma3_text" else 0
    return DTYPE_BYTES * (behind + of_heads)


def head_size(shape: dict[str, int]) -> int:
    """Elements of an attention head."""
    return shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])


def head_bytes(shape: dict[str, int]) -> int:
    """Bytes of the output matrix, read once a step; of the embedding a step reads a few rows."""
    return DTYPE_BYTES * shape["vocab_size"] * shape["hidden_size"]


def kv_bytes(shape: dict[str, int]) -> int:
    """KV bytes of one token, all layers."""
    kv = shape["num_key_value_heads"] * head_size(shape)
    return 2 * DTYPE_BYTES * kv * shape["num_hidden_layers"]

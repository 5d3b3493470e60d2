"""Caches of a model's layers, read from its config, or the reason why only vLLM knows them."""

from __future__ import annotations

import re

from placement.model.architectures import ARCHITECTURES, architecture_of, window_of
from placement.model.config import Config
from placement.model.shape import Mla
from placement.model.tensors import KvCache

FLOAT32 = 4
FULL = ("full_attention", "attention")
SLIDING = "sliding_attention"
DELTA_NET = "linear_attention"
CONVOLUTION = "conv"
KNOWN_TYPES = (*FULL, SLIDING, DELTA_NET, CONVOLUTION)
"""Entries of `layer_types` whose caches follow from the config."""
DELTA_NET_KEYS = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim",
)  # fmt: skip
UNKNOWN_KEYS = re.compile(
    r"mamba|ssm|rwkv|retention|lightning|hybrid|block_type|linear_attn|_lora_rank$|index_|compress"
    r"|kv_shared|shared_kv|cross_layer|attention_chunk|attn_layer|attn_type|global_head|"
    r"global_key_value|swa_|v_head_dim|head_dim_v|state_size|conv_kernel|memory"
)
"""Keys that speak of caches in ways that differ from family to family."""


def caches_only_vllm_knows(config: Config) -> str:
    """Why the caches of a model cannot be told from its config; empty where they can.

    Args:
        config: of the decoder.

    """
    if architecture_of(config) is not None:
        return ""
    odd = sorted(
        key
        for key, value in config.values.items()
        if value and key not in DELTA_NET_KEYS and UNKNOWN_KEYS.search(key)
    )
    if odd:
        return f"what {odd[0]} means for the caches of its layers"
    if unknown := sorted(set(config.texts("layer_types")) - set(KNOWN_TYPES)):
        return f"what layers of the type {unknown[0]} cache"
    if config.has("sliding_window") and not config.texts("layer_types"):
        return "which of its layers have a sliding window"
    return ""


def cache_of(config: Config, index: int, width: int) -> KvCache:
    """Cache of one layer.

    Args:
        config: of the decoder.
        index: of the layer.
        width: bytes of a cached value.

    Raises:
        UnknownModelError: a needed key is missing or has a wrong value.

    """
    mla, window = latents_of(config), window_of(config, index)
    types = config.texts("layer_types")
    kind = types[index] if index < len(types) else FULL[0]
    if kind == DELTA_NET and config.model_type not in ARCHITECTURES:
        return _delta_net(config, width)
    if kind == CONVOLUTION and config.model_type not in ARCHITECTURES:
        inputs = config.hidden * width
        taps = config.number("conv_L_cache", least=2)
        return KvCache(0, 1, state_bytes=(taps - 1) * inputs, draft_bytes=inputs)
    if mla is not None:
        latent = mla.kv_lora_rank + mla.qk_rope_head_dim
        flops = 2 * config.heads * (latent + mla.kv_lora_rank)
        return KvCache(latent * width, 1, window, flops)
    heads, size = config.kv_heads, config.head_dim
    return KvCache(2 * heads * size * width, heads, window, 4 * config.heads * size)


def latents_of(config: Config) -> Mla | None:
    """Sizes of multi-head latent attention; None where the model has keys and values."""
    if not config.has("kv_lora_rank"):
        return None
    return Mla(
        config.number("kv_lora_rank"),
        config.number("qk_rope_head_dim"),
        config.number("qk_nope_head_dim"),
        config.number("v_head_dim"),
    )


def _delta_net(config: Config, width: int) -> KvCache:
    """State of Gated DeltaNet: its convolution's last inputs, and a matrix of each value head.

    The matrices are in float32, as vLLM's CPU ranks have them whatever is asked for.
    """
    keys, values, key, value, taps = (config.number(name) for name in DELTA_NET_KEYS)
    inputs = (2 * keys * key + values * value) * width
    state = inputs * (taps - 1) + values * key * value * FLOAT32
    return KvCache(0, 1, state_bytes=state, draft_bytes=inputs)

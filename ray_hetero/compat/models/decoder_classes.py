"""vLLM's classes of decoder models, of their layers and of the layers' parts.

What a layer computes is known by the forward function of its class: a subclass that has the same
function computes the same, one with another function is another layer, whatever it is called.

Uses: the `forward` of all classes in `CLASSES`, of `vllm.model_executor.models`.
"""

from __future__ import annotations

import sys
from typing import Any

from ray_hetero.compat.patching import original

MODELS = "vllm.model_executor.models"
CLASSES: dict[str, tuple[str, ...]] = {
    "llama": ("LlamaModel", "LlamaDecoderLayer", "LlamaAttention", "LlamaMLP"),
    "qwen2": ("Qwen2Model", "Qwen2DecoderLayer", "Qwen2Attention", "Qwen2MLP"),
    "qwen3": ("Qwen3DecoderLayer", "Qwen3Attention"),
    "mistral": ("MistralModel", "MistralDecoderLayer", "MistralAttention", "MistralMLP"),
    "gemma": ("GemmaModel", "GemmaDecoderLayer", "GemmaAttention", "GemmaMLP"),
    "gemma2": ("Gemma2Model", "Gemma2DecoderLayer", "Gemma2Attention", "Gemma2MLP"),
    "gemma3": ("Gemma3Model", "Gemma3DecoderLayer", "Gemma3Attention", "Gemma3MLP"),
    "glm4": ("Glm4DecoderLayer", "Glm4Attention"),
    "granite": ("GraniteModel", "GraniteDecoderLayer", "GraniteAttention", "GraniteMLP"),
    "stablelm": (
        "StableLMEpochModel",
        "StablelmDecoderLayer",
        "StablelmAttention",
        "StablelmMLP",
    ),
    "opt": ("OPTDecoder", "OPTDecoderLayer", "OPTAttention"),
    "mixtral": ("MixtralModel", "MixtralDecoderLayer", "MixtralAttention"),
    "qwen2_moe": ("Qwen2MoeModel", "Qwen2MoeDecoderLayer", "Qwen2MoeAttention", "Qwen2MoeMLP"),
    "qwen3_moe": ("Qwen3MoeModel", "Qwen3MoeDecoderLayer", "Qwen3MoeAttention"),
    "qwen3_next": ("Qwen3NextModel", "Qwen3NextDecoderLayer"),
    "glm4_moe": ("Glm4MoeModel", "Glm4MoeDecoderLayer", "Glm4MoeAttention"),
    "gpt_oss": ("GptOssModel", "TransformerBlock", "OAIAttention"),
    "deepseek_v2": ("DeepseekV2Model", "DeepseekV2DecoderLayer", "DeepseekV2MLAAttention"),
    "falcon": ("FalconModel", "FalconDecoderLayer", "FalconAttention", "FalconMLP"),
}
"""Classes whose forward functions are compared, by the module that defines them."""


def has_forward_of(module: Any, *names: str) -> bool:
    """Whether a module of vLLM's computes what one of some classes does.

    Args:
        module: of any class.
        names: of classes in `CLASSES`.

    Raises:
        UnsupportedError: upstream renamed one of them.

    """
    forward = getattr(type(module), "forward", None)
    return any(forward is found for name in names for found in _forwards(name))


def _forwards(name: str) -> list[Any]:
    """Forward functions of the classes of a name whose module is loaded."""
    loaded = [
        sys.modules[f"{MODELS}.{file}"]
        for file, names in CLASSES.items()
        if name in names and f"{MODELS}.{file}" in sys.modules
    ]
    return [original(original(module, name), "forward") for module in loaded]

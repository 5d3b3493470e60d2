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


MAKERS: dict[str, Callable[[DemoShape, Common], Any]] = {
    "mistral": _mistral,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "granite": _granite,
    "glm4": _glm4,
    "stablelm": _stablelm,
}
"""Name → maker of its transformers config."""

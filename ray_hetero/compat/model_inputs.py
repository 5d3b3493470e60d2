"""What vLLM gives the layers of a model as their input."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def takes_tokens_only(vllm_config: VllmConfig) -> bool:
    """Whether a model's first layer gets nothing but what its embedding gives, in all steps alike.

    Images and given embeddings are put among the rows in some steps only, adapters change them, and
    drafters look rows up for themselves.

    Uses: `ModelConfig.is_multimodal_model`, `ModelConfig.enable_prompt_embeds`,
    `ModelConfig.runner_type`.
    """
    model = vllm_config.model_config
    return (
        model.runner_type == "generate"
        and not model.is_multimodal_model
        and not model.enable_prompt_embeds
        and vllm_config.speculative_config is None
        and vllm_config.lora_config is None
    )

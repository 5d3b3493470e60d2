"""A small checkpoint that reads images: Aria, whose language model is a mixture of experts.

Of vLLM's models with images and experts it is one that can be loaded without torchvision.
"""

from __future__ import annotations

from pathlib import Path

from ray_hetero.cli.demo.model import MAX_POSITIONS, DemoShape
from ray_hetero.cli.demo.tokenizer import text_tokens, train_tokenizer
from ray_hetero.cli.demo.weights import fill

IMAGE = "<|img|>"
IMAGE_SIZE, PATCH = 980, 70
"""Sides of an image, as Aria's processor makes it, and of a patch of it, in pixels."""
IMAGE_TOKENS = 16
"""Tokens that stand for an image."""
EXPERTS = 8


def write_image_model(directory: Path, shape: DemoShape | None = None) -> Path:
    """Write checkpoint, tokenizer and image processor; answers the directory."""
    import torch
    from transformers import (
        AriaConfig,
        AriaForConditionalGeneration,
        AriaProcessor,
        AriaTextConfig,
        GenerationConfig,
        Idefics3VisionConfig,
        PreTrainedTokenizerFast,
    )
    from transformers.models.aria.image_processing_pil_aria import AriaImageProcessorPil

    shape = shape or DemoShape()
    directory.mkdir(parents=True, exist_ok=True)
    train_tokenizer(MAX_POSITIONS).save_pretrained(directory)
    # So that the processor finds it by its name.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        directory, extra_special_tokens={"image_token": IMAGE}
    )
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    text = AriaTextConfig(
        **ids,
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate // 4,
        max_position_embeddings=MAX_POSITIONS,
        moe_num_experts=EXPERTS,
        moe_topk=2,
        moe_num_shared_experts=2,
        tie_word_embeddings=False,
    )
    vision = Idefics3VisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        image_size=IMAGE_SIZE, patch_size=PATCH,
    )  # fmt: skip
    patches = (IMAGE_SIZE // PATCH) ** 2
    config = AriaConfig(
        vision_config=vision,
        text_config=text,
        projector_patch_to_query_dict={patches: IMAGE_TOKENS},
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        tie_word_embeddings=False,
    )
    model = AriaForConditionalGeneration._from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(**ids)
    fill(model, 0, text_tokens(tokenizer))
    model.save_pretrained(directory)
    AriaProcessor(
        AriaImageProcessorPil(max_image_size=IMAGE_SIZE, split_image=False),
        tokenizer,
        size_conversion={IMAGE_SIZE: IMAGE_TOKENS},
    ).save_pretrained(directory)
    return directory

"""Small checkpoints that read images: Aria, whose language model has experts, and BLIP-2.

Of vLLM's models with images they are two that can be loaded without torchvision.  For Aria, vLLM
has no pipelines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray_hetero.cli.demo.model import MAX_POSITIONS, DemoShape
from ray_hetero.cli.demo.tokenizer import text_tokens, train_tokenizer
from ray_hetero.cli.demo.weights import fill

IMAGE = "<|img|>"
IMAGE_SIZE, PATCH = 980, 70
"""Sides of an image, as Aria's processor makes it, and of a patch of it, in pixels."""
BLIP_IMAGE = "<image>"
"""Token that vLLM looks for."""
BLIP_SIZE, BLIP_PATCH = 56, 14
"""Sides of an image, as BLIP-2's processor makes it, and of a patch of it, in pixels."""
IMAGE_TOKENS = 16
"""Tokens that stand for an image."""
EXPERTS = 8


def write_image_model(directory: Path, shape: DemoShape | None = None) -> Path:
    """Write checkpoint, tokenizer and image processor; answers the directory."""
    from transformers import (
        AriaConfig,
        AriaForConditionalGeneration,
        AriaProcessor,
        AriaTextConfig,
        Idefics3VisionConfig,
    )
    from transformers.models.aria.image_processing_pil_aria import AriaImageProcessorPil

    shape = shape or DemoShape()
    tokenizer, ids = _tokenizer(directory)
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
    _write_weights(AriaForConditionalGeneration, config, tokenizer, ids, directory)
    AriaProcessor(
        AriaImageProcessorPil(max_image_size=IMAGE_SIZE, split_image=False),
        tokenizer,
        size_conversion={IMAGE_SIZE: IMAGE_TOKENS},
    ).save_pretrained(directory)
    return directory


def write_blip2_model(directory: Path, shape: DemoShape | None = None) -> Path:
    """Write checkpoint, tokenizer and image processor of a BLIP-2; answers the directory."""
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        OPTConfig,
    )
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    shape = shape or DemoShape()
    tokenizer, ids = _tokenizer(directory, BLIP_IMAGE)
    text = OPTConfig(
        **ids,
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        word_embed_proj_dim=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        ffn_dim=shape.intermediate,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
    )
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    config = Blip2Config(
        vision_config=Blip2VisionConfig(
            **sizes, num_hidden_layers=1, image_size=BLIP_SIZE, patch_size=BLIP_PATCH
        ),
        qformer_config=Blip2QFormerConfig(
            **sizes, num_hidden_layers=2, encoder_hidden_size=64, vocab_size=len(tokenizer)
        ),
        text_config=text,
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=tokenizer.convert_tokens_to_ids(BLIP_IMAGE),
        tie_word_embeddings=False,
    )
    _write_weights(Blip2ForConditionalGeneration, config, tokenizer, ids, directory)
    Blip2Processor(
        BlipImageProcessorPil(size={"height": BLIP_SIZE, "width": BLIP_SIZE}),
        tokenizer,
        num_query_tokens=IMAGE_TOKENS,
    ).save_pretrained(directory)
    return directory


def _write_weights(
    model_class: Any, config: Any, tokenizer: Any, ids: dict[str, Any], directory: Path
) -> None:
    """Write a model of a class of Transformers with random weights, in float32."""
    import torch
    from transformers import GenerationConfig

    model = model_class._from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(**ids)
    fill(model, 0, text_tokens(tokenizer))
    model.save_pretrained(directory)


def _tokenizer(directory: Path, image: str = IMAGE) -> tuple[Any, dict[str, Any]]:
    """Write a tokenizer that knows images by name; it, and the numbers of its special tokens."""
    from transformers import PreTrainedTokenizerFast

    directory.mkdir(parents=True, exist_ok=True)
    train_tokenizer(MAX_POSITIONS).save_pretrained(directory)
    # So that the processor finds it by its name.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        directory, extra_special_tokens={"image_token": image}
    )
    return tokenizer, {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }

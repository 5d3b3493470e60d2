"""Embedding and output matrix of a CPU rank's model, as the rank holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.plan.memory import has_whole_embedding
from ray_hetero.compat.models import cpu_linear
from ray_hetero.log import logger
from ray_hetero.worker.speculation import models_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from placement.cluster.layout import Layout


def keep_embeddings(vllm_config: VllmConfig, layout: Layout, stage: int) -> bool:
    """Make vLLM create both in the form that a rank needs, before it loads its weights.

    Args:
        vllm_config: of the rank.
        layout: of the engine.
        stage: of the rank.

    Returns:
        Whether the rank holds the input embedding whole, although others are in its group.

    """
    model, models = vllm_config.model_config, models_of(vllm_config)
    is_last = stage == len(layout.stages) - 1
    is_tied = any(getattr(one.hf_text_config, "tie_word_embeddings", True) for one in models)
    cpu_linear.keep_embeddings_once(has_tied_output=is_tied and is_last)
    is_whole = has_whole_embedding(
        layout.stages[stage],
        is_first=stage == 0,
        is_last=is_last,
        is_shared=is_tied or len(models) > 1,
    )
    if is_whole:
        # Each rank adds all that an adapter adds to an embedding, to whole rows in any case.
        cpu_linear.hold_embedding_whole(model.get_vocab_size(), model.get_hidden_size())
        logger.info("each rank of this tensor-parallel group holds the input embedding whole")
    return is_whole

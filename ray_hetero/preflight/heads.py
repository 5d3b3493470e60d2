"""Attention heads of a model that the ranks of every stage have to share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.cluster.layout import Layout, heads_problem
from ray_hetero.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def refuse_heads(model: ModelConfig, layout: Layout) -> None:
    """Refuse stages whose number of ranks does not divide the heads of a model.

    Raises:
        UnsupportedError: names the stage, the arithmetic and the numbers that do.

    """
    heads: int = model.model_arch_config.total_num_attention_heads
    kv_heads: int = model.get_total_num_kv_heads()
    if heads and kv_heads and (problem := heads_problem(layout, heads, kv_heads)):
        raise UnsupportedError(problem)

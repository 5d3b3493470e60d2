"""Stages that cannot compute a model: heads that do not divide, layers that need other stages'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from placement.cluster.layout import Layout, heads_problem
from placement.model.config import Config
from placement.model.undivided import divided, uses_of
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


def refuse_divided_layers(config: Mapping[str, Any], layers: Sequence[int]) -> None:
    """Refuse stages that divide a layer from an earlier one whose results it uses.

    Args:
        config: configuration of the language model.
        layers: layers of each stage.

    Raises:
        UnsupportedError: says which layers, and which stages they are on.

    """
    if problem := divided(uses_of(Config(config)), tuple(layers)):
        raise UnsupportedError(problem)
